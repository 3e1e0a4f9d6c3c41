"""What the backends keep right in a model: options, dropout, redraws, compilation, engines that share a model out."""

import copy
import io
import json
import sys
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from architectures import BART, BERT, BY_NAME, LLAMA, tokens
from processes import run_several
from small_sections import set_small_sections
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.generation.continuous_batching import continuous_api
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import favor
from favor.integrations.backend import favor_attention_forward, model_options
from favor.integrations.exact import Share
from favor.integrations.layer import layer_number, redraw_epoch
from favor.landmark import Landmarks
from favor.registry import Family


def test_aliases_are_the_same_attention():
    built = {name: BERT.build(name, num_features=16, exact_below=0) for name in favor.BACKENDS}
    outs = {name: model(**tokens(True)).last_hidden_state for name, model in built.items()}
    for name, alias in (("favor+", "favor_plus"), ("favor++", "favor_plus_plus"), ("favor#", "favor_sharp")):
        assert torch.equal(outs[name], outs[alias])
    older = BERT.build("favor#", num_features=16, exact_below=0, features="landmark")
    assert torch.equal(older(**tokens(True)).last_hidden_state, outs["landmark"])
    distinct = [outs[n] for n in ("favor+", "favor++", "favor#", "favor_trig", "favor_relu", "favor_elu", "landmark")]
    assert all(not torch.allclose(a, b) for i, a in enumerate(distinct) for b in distinct[:i])


def test_options_are_merged_validated_and_stored():
    model = BERT.build("favor#")
    favor.configure(model, num_features=32, features="saderf")
    favor.configure(model, exact_below=0)
    options = model_options(model.config)
    assert (options.num_features, options.features, options.exact_below) == (32, "saderf", 0)
    assert json.loads(json.dumps(model.config.favor)) == options.to_dict()
    assert set(model.config.favor) == {field.name for field in fields(options)}
    before = dict(model.config.favor)
    with pytest.raises(ValueError, match=r"unknown option num_feature; .*Did you mean 'num_features'"):
        favor.configure(model, num_feature=3)
    assert model.config.favor == before
    # Options of other backends do not stop one that has no use for them.
    model = BERT.build("favor_relu", num_features=16, exact_below=0)
    expected = model(**tokens(True)).last_hidden_state
    model.config.favor |= {"statistics": "calibrated", "kernel": "triton"}
    assert torch.equal(model(**tokens(True)).last_hidden_state, expected)
    favor.configure(model, "favor_relu", num_features=16)
    favor.configure(BERT.build("favor+"), "favor+", factorization="newton_schulz")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_features": 0}, ValueError, "num_features must be at least 1"),
        ({"num_features": True}, TypeError, "num_features must be an integer"),
        ({"features": "pos"}, ValueError, "features must be one of None, 'wderf', 'saderf'"),
        ({"features": "landmark", "statistics": "calibrated"}, ValueError, "landmark attention has no parameters"),
        ({"features": "landmark", "factorization": "cholesky"}, ValueError, "factorization of landmark must be one of"),
        ({"selected_keys": -1}, ValueError, "selected_keys must be at least 0, got -1"),
        ({"factorization": "svd"}, ValueError, "factorization must be one of 'auto', 'eigh'"),
        ({"statistics": "frozen"}, ValueError, "statistics must be one of 'batch', 'calibrated', 'corrected'"),
        ({"exact_below": "always"}, ValueError, "exact_below must be"),
        ({"exact_below": 0.5}, TypeError, "exact_below must be an integer"),
        ({"orthogonal": 1}, TypeError, "orthogonal must be"),
        ({"seed": None}, TypeError, "seed must be an integer"),
    ],
)
def test_bad_options_name_what_was_expected(options, error, message):
    with pytest.raises(error, match=message):
        favor.FavorConfig(**options)


def test_exact_below_auto_is_the_crossover_of_the_device():
    bidirectional, causal = Family.crossover["cpu"]
    config, windowed = favor.FavorConfig(num_features=100), favor.FavorConfig(num_features=100, window=128)
    thresholds = [own.exact_threshold("cpu", is_causal) for own in (config, windowed) for is_causal in (False, True)]
    assert thresholds[:2] == [100 * bidirectional, 100 * causal]
    assert thresholds[2:] == [100 * bidirectional * Family.windowed["cpu"], 100 * causal]
    assert config.exact_threshold("mps", False) == config.exact_threshold("cuda", False)
    assert favor.FavorConfig(exact_below=7).exact_threshold("cuda", True) == 7
    for features in (None, "landmark"):
        named = favor.FavorConfig(features=features)
        assert [named.selected("landmark", is_causal) for is_causal in (False, True)] == [768, 1024]
    both = (config.exact_threshold("cpu", causal, "landmark") for causal in (False, True))
    assert tuple(both) == Landmarks.crossover_keys["cpu"]  # whatever the number of means


CHANGES = [
    *({"features": name} for name in ("saderf", "aderf", "cderf")),
    *({"factorization": "cholesky"}, {"orthogonal": False}, {"seed": 1}, {"num_features": 17}, {"window": 4}),
]


def test_every_option_has_an_effect():
    built = [BERT.build("favor#", **{"num_features": 16, "exact_below": 0, **change}) for change in ({}, *CHANGES)]
    default, *outs = (model(**tokens(True)).last_hidden_state for model in built)
    for change, out in zip(CHANGES, outs, strict=True):
        assert not torch.allclose(default, out, atol=1e-4), change


def test_a_model_built_before_the_import_is_told_what_to_do():
    model = BERT.build("favor+", num_features=16, exact_below=0)
    expected = model(**tokens(False)).last_hidden_state
    for module in model.modules():
        vars(module).pop("favor_layer", None)
    with pytest.raises(ValueError, match=r"Import favor before building the model, or call favor.configure"):
        model(**tokens(False))
    assert torch.equal(favor.configure(model)(**tokens(False)).last_hidden_state, expected)


def test_dropout_drops_weights_without_bias():
    module = BERT.build("favor+", num_features=16, exact_below=0).encoder.layer[0].attention.self
    query, key, value = torch.randn(3, 1, 4, 12, 8, generator=torch.Generator().manual_seed(0))
    value = value.double()
    plain, _ = favor_attention_forward("favor+", module, query.double(), key.double(), value, None)
    torch.manual_seed(0)
    rows = [tensor.double().expand(2000, -1, -1, -1) for tensor in (query, key, value)]
    outs = favor_attention_forward("favor+", module, *rows, None, dropout=0.3)[0]
    z = (outs.mean(0) - plain[0]) / (outs.std(0) / 2000**0.5)
    assert z.abs().max() < 5
    assert outs.std(0).min() > 0


def redrawing(interval: int) -> hf.BertModel:
    return without_dropout(BERT.build("favor+", num_features=16, exact_below=0, redraw_interval=interval))


def without_dropout(model):
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_redraws_happen_in_training_at_their_interval():
    model = redrawing(2)
    evaluated = model(**tokens(False)).last_hidden_state
    model.train()
    outs = [model(**tokens(False)).last_hidden_state for _ in range(6)]
    same = [torch.equal(a, b) for a, b in zip(outs[1:], outs[:-1], strict=True)]
    assert same == [True, False, True, False, True]
    model.eval()
    assert torch.equal(model(**tokens(False)).last_hidden_state, evaluated)


def test_redraw_counts_continue_from_a_checkpoint():
    model = redrawing(2).train()
    for _ in range(3):
        model(**tokens(False))
    state = favor.RedrawCounter(model).state_dict()
    expected = [model(**tokens(False)).last_hidden_state for _ in range(3)]
    fresh = redrawing(2).train()
    favor.RedrawCounter(fresh).load_state_dict(json.loads(json.dumps(state)))
    for out in expected:
        assert torch.equal(fresh(**tokens(False)).last_hidden_state, out)
    with pytest.raises(ValueError, match="another model"):
        favor.RedrawCounter(LLAMA.build("sdpa")).load_state_dict({"calls": []})
    pair = torch.nn.ModuleDict({"a": redrawing(2).train(), "b": redrawing(2).train()})
    pair["a"](**tokens(False))
    calls = favor.RedrawCounter(pair).state_dict()["calls"]
    assert (max(calls[: len(calls) // 2]), max(calls[len(calls) // 2 :])) == (1, 0)


def test_recomputed_activations_see_the_same_directions():
    """Activation checkpointing runs forward again in the backward pass; it must not count as another pass."""
    gradients = []
    for recompute in (False, True):
        model = redrawing(1).train()
        for _ in range(2):
            hidden = torch.ones(1, 24, 32) * torch.linspace(-1, 1, 24)[None, :, None]
            hidden.requires_grad_()
            layer = model.encoder.layer[0]
            out = checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden)
            out.square().sum().backward()
        gradients.append(hidden.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    loss = sum(checkpoint(layer, hidden, use_reentrant=False).square().sum() for _ in range(2))
    with pytest.raises(ValueError, match="redraw_interval=1 changed the random directions"):
        loss.backward()


def test_layers_have_their_own_directions():
    model = BERT.build("favor+")
    numbers = [layer.attention.self.favor_layer.number for layer in model.encoder.layer]
    assert len(set(numbers)) == 2
    for name, module in BART.build("favor#").named_modules():
        if hasattr(module, "favor_layer") and name.startswith(("encoder.", "decoder.layers.0.encoder_attn")):
            assert module.favor_layer.decodes == name.startswith("decoder.")
    head = hf.BertForMaskedLM._from_config(BERT.config(), attn_implementation="favor+")
    assert [layer.attention.self.favor_layer.number for layer in head.bert.encoder.layer] == numbers


def test_a_module_has_one_object_of_ours_and_its_copies_share_no_counts():
    """Replicas of `nn.DataParallel` take over the attributes of a module as they are."""
    model = redrawing(1).train()
    module = model.encoder.layer[0].attention.self
    assert [name for name in vars(module) if name.startswith("favor")] == ["favor_layer"]
    model(**tokens(False))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False).encoder.layer[0].attention.self
    copies = [copy.deepcopy(module), loaded, module._replicate_for_data_parallel()]
    for number, other in enumerate(copies):
        assert layer_number(other) == layer_number(module)
        assert [redraw_epoch(other, 1) for _ in range(number + 1)] == list(range(2, number + 3))
    assert redraw_epoch(module, 1) == 2


# With a window and without, with weights of features, and landmarks in both modes.
COMPILED = [
    ("favor#", {"feature_weights": True, "refine_steps": 0}, "inference"),
    ("favor#", {"window": 7}, "training"),
    ("landmark", {"selected_keys": 6}, "training"),
    ("landmark", {"selected_keys": 0}, "inference"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # tracing runs code of torch and transformers that warns
@pytest.mark.parametrize(("backend", "options", "mode"), COMPILED)
def test_models_compile_without_graph_breaks(backend, options, mode):
    if "feature_weights" in options:
        model = favor.calibrate(BERT.build("sdpa"), [tokens(True)], num_features=16, exact_below=0, **options)
    else:
        model = BERT.build(backend, num_features=16, exact_below=0, **options).train(mode == "training")
    model.encoder.layer = model.encoder.layer[:1]  # the next test compiles several
    without_dropout(model)  # compiled code draws other random numbers
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    results = []
    for run in (model, compiled):
        with torch.set_grad_enabled(mode == "training"):
            out = run(**tokens(True)).last_hidden_state
        if mode == "training":
            model.zero_grad()
            out.square().sum().backward()
        # Compiled code gives zeros where a parameter has no part in the loss.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        assert any(grad.any() for grad in grads) == (mode == "training")
        results.append([out.detach(), *grads])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("default")
def test_layers_compiled_one_by_one_keep_their_directions():
    """The number of a layer is a constant of its graph; as a number that varies it could seed nothing."""
    model = BERT.build("favor+", num_features=16, exact_below=0)
    expected = model(**tokens(True)).last_hidden_state
    torch._dynamo.reset()
    for layer in model.encoder.layer:
        layer.compile(fullgraph=True, backend="eager")
    assert torch.equal(model(**tokens(True)).last_hidden_state, expected)


CROSS = {
    "gpt2": (hf.GPT2Model, hf.GPT2Config(**BY_NAME["gpt2"].config().to_dict() | {"add_cross_attention": True})),
    "bart": (hf.models.bart.modeling_bart.BartDecoder, BART.config()),
}


@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
@pytest.mark.parametrize("features", [None, "landmark"])
@pytest.mark.parametrize("name", CROSS)
@pytest.mark.usefixtures("small_sections")
def test_cross_attention_of_decoders_does_not_show_the_future(name, features):
    """Its queries are the decoder's tokens, so statistics over them would; not all decoders say that they are one."""
    model_class, config = CROSS[name]
    config.favor = {"features": features, "num_features": 6 if features else 16, "exact_below": 0}
    if features:  # few keys: what one query chooses must not be what a later one wants
        config.favor |= {"selected_keys": 4}
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="favor#").eval()
    ids = tokens(False)["input_ids"]
    later = ids.clone()
    later[:, 12:] = (later[:, 12:] + 7) % 36 + 4
    states = torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(1))
    out, changed = (model(input_ids=i, encoder_hidden_states=states).last_hidden_state for i in (ids, later))
    torch.testing.assert_close(changed[:, :12], out[:, :12], rtol=0, atol=1e-6)
    assert not torch.allclose(changed[:, 12:], out[:, 12:])


def test_configure_keeps_options_of_sub_models():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    model = hf.CLIPModel(hf.CLIPConfig(text_config={**sizes, "vocab_size": 40}, vision_config=vision))
    with pytest.warns(UserWarning, match="stored num_features, which no layer reads: the backend is 'sdpa'"):
        favor.configure(model.vision_model, num_features=64)
    favor.configure(model, "favor+", exact_below=0)
    options = [model_options(part.config) for part in (model.vision_model, model.text_model)]
    assert [(own.num_features, own.exact_below) for own in options] == [(64, 0), (256, 0)]
    assert model.vision_model.config.favor is not model.text_model.config.favor


PARALLEL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 16}
PARALLEL |= {"vocab_size": 50, "initializer_range": 0.5}
ROWS = torch.arange(80).view(2, 40) * 7 % 50


def llama(backend="favor+", calibrated=False, **options):
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**PARALLEL, num_key_value_heads=4)).eval()
    favor.configure(model, backend, **{"exact_below": 0, "num_features": 8, **options})
    if calibrated:
        favor.calibrate(model, [{"input_ids": ROWS}])
        favor.configure(model, statistics="calibrated")
    return model


def outputs(model):
    with torch.no_grad():
        return model(ROWS).last_hidden_state


def tensor_parallel(model, mesh):
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**plan, "self_attn.o_proj": RowwiseParallel()})
    return model


def compare_with_one_process(mesh):
    wrong = {}
    for name, options in {
        "favor+": {},
        "window": {"window": 8},
        "landmark": {"backend": "landmark", "selected_keys": 4},
        "calibrated": {"backend": "favor#", "calibrated": True},
        "weights": {"calibrated": True},
        "compiled": {},
    }.items():
        wanted = outputs(llama(**options))
        model = tensor_parallel(llama(**options), mesh)
        if name == "compiled":
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        error = (outputs(model) - wanted).abs().max().item()
        if not error < 1e-4:
            wrong[name] = error
    assert not wrong, wrong
    model = tensor_parallel(llama(), mesh)
    model.config.num_key_value_heads = 6
    with pytest.raises(ValueError, match="has 2 of 6 key heads in one of 2 processes"):
        outputs(model)


def refused_in_context_parallel(mesh):
    torch.manual_seed(0)
    for backend in ("favor+", "landmark"):
        model = favor.configure(BertModel(BertConfig(**PARALLEL)).eval(), backend, exact_below=0)
        ids = ROWS.clone()
        inside = context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1])  # torch 2.11 stays inside after an error
        with torch.no_grad(), inside, pytest.raises(ValueError, match="inside torch's context_parallel"):
            model(ids)
        outputs(model)  # and afterwards it works
    query = torch.randn(1, 2, 8, 4)
    whole = DTensor.from_local(query, mesh, [Replicate()])
    with pytest.raises(ValueError, match="got a DTensor"):
        favor.favor_attention(whole, whole, whole, features="pos")


def in_parallel(rank, address):
    torch.set_num_threads(1)
    set_small_sections(pytest.MonkeyPatch())
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    compare_with_one_process(mesh)
    refused_in_context_parallel(mesh)
    dist.destroy_process_group()


def test_tensor_parallelism_equals_one_process_and_context_parallelism_is_refused(tmp_path):
    run_several(in_parallel, f"file://{tmp_path / 'rendezvous'}")


def test_what_a_share_of_the_heads_has():
    share = Share(first=4, number=2, total=8)
    assert share.exact_heads([0, 4, 7]) == [0]
    assert share.drawn([0, 4, 7]) == (3, 5)
    assert share.drawn(()) == (4, 8)
    with pytest.raises(ValueError, match=r"key_heads must be the number of the first of 4 key heads"):
        favor.favor_attention(*torch.randn(3, 1, 4, 10, 8), features="pos", key_heads=(2, 4))


def test_a_library_that_replaces_all_attention_functions_is_named(monkeypatch):
    model = llama()

    def replacement(module, query, key, value, *args, **kwargs):
        raise AssertionError("runs exact attention")

    replacement.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(sys.modules, "deepspeed", pytest)
    replaced = dict.fromkeys(ALL_ATTENTION_FUNCTIONS, replacement)
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", replaced)
    with pytest.raises(ValueError, match="DeepSpeed has replaced the attention functions of transformers"):
        outputs(model)


def test_continuous_batching_is_refused(monkeypatch):
    """Otherwise transformers would switch the model to flash attention where that is installed."""
    model = favor.configure(LlamaForCausalLM(LlamaConfig(**PARALLEL)).eval(), "favor+")
    refused = r"favor\+ is not supported for continuous batching, whose pages .* use model.generate"
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True, raising=False)
    for batching in (
        lambda: model.generate_batch([[1, 2, 3]], max_new_tokens=2),
        lambda: model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, cache_implementation="paged"),
        lambda: model.init_continuous_batching(),
        lambda: model.set_attn_implementation("paged|favor+"),
    ):
        with pytest.raises(ValueError, match=refused):
            batching()
    assert model.config._attn_implementation == "favor+"
