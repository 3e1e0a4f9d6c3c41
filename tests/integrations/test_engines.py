"""Engines that replace parts of a model or share it out: they work, or one error says why not."""

import sys

import pytest
import torch
import torch.distributed as dist
from small_sections import set_small_sections
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import favor
from favor.integrations.exact import Share
from tests.processes import run_two

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 16}
SIZES |= {"vocab_size": 50, "initializer_range": 0.5}
IDS = torch.arange(80).view(2, 40) * 7 % 50


def llama(backend="favor+", calibrated=False, **options):
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=4)).eval()
    favor.configure(model, backend, **{"exact_below": 0, "num_features": 8, **options})
    if calibrated:
        favor.calibrate(model, [{"input_ids": IDS}])
        favor.configure(model, statistics="calibrated")
    return model


def outputs(model):
    with torch.no_grad():
        return model(IDS).last_hidden_state


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
        model = favor.configure(BertModel(BertConfig(**SIZES)).eval(), backend, exact_below=0)
        ids = IDS.clone()
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
    run_two(in_parallel, f"file://{tmp_path / 'rendezvous'}")


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
    monkeypatch.setattr(
        ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict.fromkeys(ALL_ATTENTION_FUNCTIONS, replacement), raising=True
    )
    with pytest.raises(ValueError, match="DeepSpeed has replaced the attention functions of transformers"):
        outputs(model)


def test_continuous_batching_is_refused():
    model = favor.configure(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), "favor+")
    with pytest.raises(ValueError, match=r"favor\+ is not supported for continuous batching"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
