"""Weights of features, learned from data: what they are, what they do to attention, where they are kept."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import transformers as hf
from pairwise import pairs
from safetensors.torch import load_file
from test_calibrate import OPTIONS, SIZES, batches, bert, llama, tokens

import favor
from favor import FavorConfig, favor_attention, features
from favor.decomposition import mixture_proportions
from favor.features import Parameters
from favor.integrations.adapt.feature_weights import LayerFit, Sample, Samples, fit_weights
from favor.integrations.adapt.observe import observe
from favor.integrations.layer import attention_modules, change_state, stored_parameters
from favor.integrations.stored import update_choices
from favor.models.bert import PerformerBertConfig, PerformerBertModel


def calibrated(model, backend="favor#", **options):
    return favor.calibrate(model, batches(), attn_implementation=backend, feature_weights=True, **OPTIONS, **options)


LEARNED = [
    ("favor+", "gerf", {}),
    ("favor++", "gerf", {}),
    ("favor#", "sderf", {"features": "sderf"}),
    ("favor#", "wderf", {"refine_steps": 0}),
    ("favor#", "wderf", {"refine_steps": 12}),
]


@pytest.mark.parametrize(*pairs(learned=LEARNED, make=(bert, llama), window=(0, 8)))
def test_the_model_runs_with_its_weights(learned, make, window):
    (backend, family, options), model, plain = learned, make(), make()
    calibrated(model, backend, window=window, **options)
    seen = []
    with torch.no_grad():
        with observe(plain, seen.append):
            plain(tokens())
        # The first layer sees what it saw in the exact model.
        o, module = seen[0], attention_modules(model)[seen[0].layer]
        parameters = stored_parameters(module)
        assert parameters.log_weights.shape == (o.key.shape[1], OPTIONS["num_features"])
        assert parameters.log_weights.std() > 0.01
        settings = {"scale": o.scale, "layer": o.layer, "is_causal": o.is_causal, "window": window, "num_features": 24}
        expected = favor_attention(o.query, o.key, o.value, features=family, parameters=parameters, **settings)
        kept = []
        hook = module.register_forward_hook(lambda _, __, result: kept.append(result[0]))
        model(tokens())
        hook.remove()
        flat = expected.transpose(1, 2).flatten(2)
        flat = flat if not hasattr(module, "o_proj") else module.o_proj(flat)
        torch.testing.assert_close(kept[0], flat, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learned", [False, True], ids=["parameters", "weights"])
@pytest.mark.parametrize("kind", ["bert", "performer"])
def test_saved_and_loaded(kind, learned, tmp_path):
    performer = PerformerBertModel, PerformerBertConfig
    classes = {"bert": (hf.BertForSequenceClassification, hf.BertConfig), "performer": performer}
    options = {"feature_weights": True, "refine_steps": 10} if learned else {}
    model = favor.calibrate(bert(*classes[kind]), batches(), window=8, **OPTIONS, **options)
    model.save_pretrained(tmp_path)
    assert sum("favor_" in name for name in load_file(tmp_path / "model.safetensors")) == 2 * (3 + learned)
    named = {"attn_implementation": "favor#"} if kind == "bert" else {}
    loaded, info = hf.AutoModel.from_pretrained(tmp_path, output_loading_info=True, **named)
    assert not info["missing_keys"]
    assert not any("favor" in key for key in info["unexpected_keys"])
    base = model.bert if kind == "bert" else model
    with torch.no_grad():
        expected = base(tokens()).last_hidden_state
        assert torch.equal(loaded.eval()(tokens()).last_hidden_state, expected)
        half = hf.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16, **named).eval()(tokens()).last_hidden_state
    assert half.isfinite().all()
    assert (half.float() - expected).norm() < 0.1 * expected.norm()


def test_without_statistics_or_with_others_favor_plus_is_plain():
    model = favor.calibrate(bert(), batches(), **OPTIONS)
    with torch.no_grad():
        model.set_attn_implementation("favor+")
        plain = favor.configure(bert(), "favor+", **OPTIONS)
        assert torch.equal(model(tokens())[0], plain(tokens())[0])


def test_weights_are_refused_for_other_directions():
    model = calibrated(bert(), "favor+")
    same = {**OPTIONS, "seed": 0, "orthogonal": True, "redraw_interval": 0, "window": 0}
    for change in ({"num_features": 32}, {"seed": 1}, {"orthogonal": False}, {"redraw_interval": 5}, {"window": 4}):
        favor.configure(model, **{**same, **change})
        with pytest.raises(ValueError, match="has weights of features, learned for num_features=24"):
            model(tokens())
    favor.calibrate(model, batches(), **{**same, "orthogonal": False})
    model(tokens())  # calibrated anew, without weights
    assert not any("favor_log_weights" in name for name in model.state_dict())
    assert not any("weights_of" in own for own in model.config.favor_layers.values())


def test_bad_requests_say_what_is_wrong():
    for message, options in (
        ("redraw_interval=5 would change; set redraw_interval=0", {"redraw_interval": 5}),
        ("relu features take no weights", {"backend": "favor_relu"}),
        ("refine_steps must be 0 for pos features", {"backend": "favor+", "refine_steps": 3}),
        ("at least 0 for cderf and wderf; got -1", {"refine_steps": -1}),
        ("at least 0 for cderf and wderf; got 2.5", {"refine_steps": 2.5}),
        ("no sequence of the data is longer than window=20", {"window": 20}),
    ):
        with pytest.raises(ValueError, match=message):
            calibrated(bert(), **options)
    with pytest.raises(ValueError, match="refine_steps belongs to feature_weights=True"):
        favor.calibrate(bert(), batches(), refine_steps=3, **OPTIONS)


def gain(model, plain, ids, heads):
    """How much weights lower the divergence of some heads of the first layer, from the layer's own output."""
    seen = []
    with torch.no_grad(), observe(plain, seen.append):
        plain(ids)
    o, found = seen[0], []
    eye = torch.eye(ids.shape[1]).expand(*o.key.shape[:2], -1, -1)
    softmax = (o.scale * o.query @ o.key.transpose(-1, -2)).softmax(-1)
    module = attention_modules(model)[o.layer]
    for statistics in ("batch", "calibrated"):
        favor.configure(model, statistics=statistics)
        attention = hf.modeling_utils.ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        with torch.no_grad():
            rows = attention(module, o.query, o.key, eye, None, scaling=o.scale)[0].transpose(1, 2)
        found.append((softmax * (softmax.log() - rows.clamp(min=1e-30).log())).sum(-1).mean((0, 2))[heads].mean())
    return found[0] - found[1]


def test_heads_that_stay_exact_leave_the_others_their_directions():
    model = bert()
    favor.configure(model, "favor+", **OPTIONS)
    for layer in model.encoder.layer:
        update_choices(model, {layer.attention.self.favor_layer.number: {"exact_heads": [0, 2]}})
    calibrated(model, "favor+")
    assert gain(model, bert(), tokens(), [1, 3]) > 0.02
    module = model.encoder.layer[0].attention.self
    assert not module.favor_log_weights[[0, 2]].any()
    assert module.favor_log_weights[[1, 3]].std(-1).min() > 0.01
    update_choices(model, {module.favor_layer.number: {"exact_heads": [0]}})
    with pytest.raises(ValueError, match=r"learned for .*exact_heads=\[0, 2\]"):
        model(tokens())


def test_a_part_of_a_model_keeps_its_directions(tmp_path):
    """The decoder's layers have other numbers without the encoder."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 50, "max_position_embeddings": 64}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    torch.manual_seed(0)
    whole = hf.BartForConditionalGeneration(hf.BartConfig(**sizes, **heads, init_std=0.3)).eval()
    data = [{"input_ids": tokens(4, 40), "decoder_input_ids": tokens(4, 40, seed=1)}]
    options = {**OPTIONS, "attn_implementation": "favor+", "feature_weights": True}
    favor.calibrate(whole, data, **options).save_pretrained(tmp_path)
    part = hf.BartForCausalLM.from_pretrained(tmp_path, attn_implementation="favor+").eval()
    outs, generator = [], torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, 2, 12, 8, generator=generator).unbind(0)
    for decoder in (whole.model.decoder, part.model.decoder):
        module = decoder.layers[0].self_attn
        assert module.favor_log_weights.std() > 0.01
        outs.append(hf.modeling_utils.ALL_ATTENTION_FUNCTIONS["favor+"](module, *inputs, None)[0])
    numbers = {model.model.decoder.layers[0].self_attn.favor_layer.number for model in (whole, part)}
    assert len(numbers) == 2
    assert torch.equal(*outs)


def test_a_calibrated_encoder_in_another_model_keeps_its_weights(tmp_path):
    encoder = calibrated(bert(), "favor+")
    config = hf.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True, max_position_embeddings=64)
    decoder = hf.BertLMHeadModel(config)
    with torch.no_grad():
        expected = encoder(tokens())[0]
        both = hf.EncoderDecoderModel(encoder=encoder, decoder=decoder)
        assert torch.equal(both.encoder(tokens())[0], expected)
    for layer in encoder.encoder.layer:
        change_state(layer.attention.self, choice={})
    with pytest.raises(ValueError, match="needs parameters of pos in every layer"):
        encoder(tokens())


def test_a_layer_used_at_several_depths_is_sampled_at_all(monkeypatch):
    monkeypatch.setattr("favor.integrations.adapt.feature_weights.SEQUENCES", 24)
    config = hf.AlbertConfig(**SIZES, embedding_size=16, num_hidden_groups=1, max_position_embeddings=64)
    config.num_hidden_layers = 4
    samples, keys = Samples(0), []
    model = hf.AlbertModel(config).eval()
    with torch.no_grad(), observe(model, samples), observe(model, lambda seen: keys.append(seen.key)):
        model(tokens(12, 16))
    with torch.no_grad(), observe(model, samples):
        model(tokens(12, 16))
    (found,) = samples.layers.values()
    assert len(found) == 24
    calls = [sum(bool(torch.isclose(s.y, key[n] * 4**-0.25).all()) for s in found for n in range(12)) for key in keys]
    assert sum(calls) == 24
    assert min(calls) > 0


def test_logits_beyond_any_estimate_do_not_break_the_model():
    model = bert()
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.mul_(60)
    for backend in ("favor+", "favor#"):
        calibrated(model, backend, window=8, refine_steps=None if backend == "favor+" else 5)
        assert all(buffer.isfinite().all() for buffer in model.buffers() if buffer.is_floating_point())
        with torch.no_grad():
            assert model(tokens())[0].isfinite().all()


def test_inverses_are_computed_once_and_again_when_a_buffer_changes(monkeypatch):
    model, calls, inverse = favor.calibrate(bert(), batches(), **OPTIONS), [], torch.linalg.inv
    monkeypatch.setattr(torch.linalg, "inv", lambda matrix: calls.append(1) or inverse(matrix))
    with torch.no_grad():
        for _ in range(3):
            model(tokens())
        assert len(calls) == 2
        module = model.encoder.layer[0].attention.self
        module.favor_transform.mul_(2)
        found = stored_parameters(module)
        assert len(calls) == 3
        torch.testing.assert_close(found.inverse @ found.transform, torch.eye(4).expand(4, -1, -1), rtol=0, atol=1e-4)
        model.double()
        model(tokens())
        assert len(calls) == 5


HEADS, GROUPS, WIDTH = 2, 2, 8
CONFIG = FavorConfig(num_features=12)


def sample(length=24, seed=0, window=0, is_causal=False, scale=0.7):
    """Queries and keys of two key heads, from a fixed distribution with strong and weak directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    noise = torch.randn(HEADS, GROUPS + 1, length, WIDTH, generator=generator)
    x = scale * (noise[:, :GROUPS] @ mixing[0].unsqueeze(1) + 0.3)
    y = scale * (noise[:, GROUPS] @ mixing[1] - 0.3)
    return Sample(x, y, torch.arange(length), window, is_causal)


def fit_of(family, samples):
    """A fit that has not learned yet, with the closed-form parameters of all samples together."""
    keys = torch.cat([s.y for s in samples], 1)
    queries = torch.cat([s.x.flatten(1, 2) for s in samples], 1)
    parameters = family.fit(queries, keys)
    eye = torch.eye(WIDTH).expand(HEADS, -1, -1)
    matrices = {name: getattr(parameters, name).expand_as(eye) for name in ("transform", "inverse", "factor")}
    whole = replace(parameters, log_weights=torch.zeros(HEADS, CONFIG.num_features), **matrices)
    return LayerFit(family, whole, samples, CONFIG, 3)


def attention_matrix(own, name, parameters):
    """What `favor_attention` does with the values: its output for the identity, `[Hk, G, R, S]`."""
    eye = torch.eye(own.y.shape[1]).expand(1, HEADS, -1, -1)
    options = {"num_features": CONFIG.num_features, "scale": 1.0, "layer": 3, "parameters": parameters}
    options |= {"features": name, "is_causal": own.is_causal, "window": own.window}
    return favor_attention(own.x.flatten(0, 1)[None], own.y[None], eye, **options)[0].unflatten(0, (HEADS, GROUPS))


def divergence(own, matrix):
    """Mean over rows of KL(softmax || matrix), `[Hk]`, written out."""
    logits = own.x.double() @ own.y.double().unsqueeze(1).transpose(-1, -2)
    if own.is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
    exact = logits.softmax(-1)
    terms = torch.where(exact > 0, exact * (exact.clamp(min=1e-300).log() - matrix.double().clamp(min=1e-300).log()), 0)
    return terms.sum(-1).mean((1, 2))


@pytest.mark.parametrize(*pairs(name=("gerf", "sderf", "wderf"), window=(0, 8), is_causal=(False, True)))
def test_the_divergence_is_that_of_the_attention(name, window, is_causal):
    own = sample(window=window, is_causal=is_causal)
    fit = fit_of(features.get(name), [own])
    noise = torch.randn(HEADS, CONFIG.num_features, generator=torch.Generator().manual_seed(5))
    parameters = replace(fit.parameters, log_weights=noise)
    expected = divergence(own, attention_matrix(own, name, parameters))
    torch.testing.assert_close(fit.divergence(parameters).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    *pairs(name=("gerf", "saderf", "aderf", "sderf", "cderf", "wderf"), window=(0, 8), is_causal=(False, True))
)
def test_t14_calibration_never_gets_worse_and_other_data_gain(name, window, is_causal):
    options = {"window": window, "is_causal": is_causal}
    samples = [sample(seed=seed, **options) for seed in range(24)]
    fit = fit_of(features.get(name), samples)
    before, reached = fit.parameters, [fit.divergence(fit.parameters)]
    for _ in range(6):
        fit.parameters = fit.weighted(fit.parameters, 5)
        reached.append(fit.divergence(fit.parameters))
    for earlier, later in pairwise(reached):
        assert (later <= earlier + 1e-5).all()
    assert (reached[-1] < reached[0]).all()
    others = [sample(seed=100 + seed, **options) for seed in range(6)]
    both = [[attention_matrix(own, name, p) for own in others] for p in (before, fit.parameters)]
    means = [torch.stack([*map(divergence, others, each)]).mean() for each in both]
    assert means[1] < means[0]


def test_weights_solve_the_mixture_of_all_pairs():
    """Against the matrix of likelihoods written out, one column a feature."""
    own = sample(10)
    fit = fit_of(features.get("sderf"), [own])
    parameters = fit.parameters
    found = fit.weighted(parameters, 3000)
    x, y = own.x.flatten(1, 2).double(), own.y.double()
    exact = (x @ y.transpose(-1, -2)).softmax(-1)
    wide = Parameters(*(getattr(parameters, n).double() for n in ("transform", "inverse", "factor")), maps=False)
    rf = features.get("sderf")
    q, k = (rf.log_phi(rows, fit.omega.double(), wide, side).exp() for rows, side in ((x, "query"), (y, "key")))
    pairs = torch.einsum("him,hjm->hijm", q, k)
    pairs = pairs / pairs.sum((2, 3), keepdim=True)
    mass = pairs.sum((1, 2))
    for head in range(HEADS):
        likelihoods = (pairs / mass[:, None, None])[head].flatten(0, 1)
        result = mixture_proportions(likelihoods, exact[head].flatten(), tol=1e-7)
        weights = result.proportions / mass[head], found.log_weights[head].double().exp()
        rows = [e / e.sum() for e in ((pairs[head] * w).sum(-1) for w in weights)]
        torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(*pairs(window=(0, 8), is_causal=(False, True)))
def test_parameters_are_refined_head_by_head(window, is_causal):
    samples = [sample(seed=seed, window=window, is_causal=is_causal) for seed in range(4)]
    weights, both = fit_of(features.get("wderf"), samples), fit_of(features.get("wderf"), samples)
    alone, refined = weights.fit(0), both.fit(40)
    assert (both.divergence(refined) < weights.divergence(alone)).all()
    assert torch.equal(alone.transform, weights.parameters.transform)
    eye = torch.eye(WIDTH).expand(HEADS, -1, -1)
    torch.testing.assert_close(refined.transform @ refined.inverse, eye, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [bert, llama])
def test_samples_are_the_real_tokens_of_the_model(make):
    """Padding at either end does not count."""
    model, seen = make(), []
    with torch.no_grad(), observe(model, seen.append):
        model(**{name: tensor for name, tensor in batches()[0].items() if name != "labels"})
    for o in seen:
        found = [Sample.of(o, number, 4) for number in range(3)]
        assert [s.y.shape[1] for s in found] == [20, 13, 14]
        for number, own in enumerate(found):
            real = o.padding[number]
            torch.testing.assert_close(own.y, o.scale**0.5 * o.key[number][:, real])
            torch.testing.assert_close(own.x.flatten(0, 1), o.scale**0.5 * o.query[number][:, real])
            assert own.window == 4
            assert torch.equal(own.places, torch.arange(own.y.shape[1]))


def test_what_has_no_data_keeps_its_weight():
    """A window covers all but one of the sequences; heads that stay exact have none at all."""
    samples = [sample(8, seed=1, window=8), sample(8, seed=2, window=8)]
    with pytest.raises(ValueError, match="longer than window=8"):
        fit_weights(features.get("sderf"), fit_of(features.get("sderf"), samples).parameters, samples, CONFIG, 3, 0)
    fit = fit_of(features.get("sderf"), samples)
    assert not fit.weighted(fit.parameters, 5).log_weights.any()
