"""Weights of features, learned from data: what they are, what they do to attention, where they are kept."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from test_calibration import OPTIONS, batches, bert, llama, tokens
from transformers import AutoModel

import favor
from favor import FavorConfig, favor_attention, features
from favor.decomposition import mixture_proportions
from favor.features import Parameters
from favor.integrations.feature_weights import LayerFit, Sample
from favor.integrations.layers import attention_modules
from favor.integrations.observe import observe
from favor.integrations.stored import stored_parameters
from favor.models.bert import PerformerBertConfig, PerformerBertModel

HEADS, GROUPS, WIDTH = 2, 2, 8
CONFIG = FavorConfig(num_features=12)
CASES = [(0, False), (8, False), (0, True), (8, True)]
each_case = pytest.mark.parametrize(("window", "is_causal"), CASES)


def sample(length=24, seed=0, window=0, is_causal=False, scale=0.7):
    """Queries and keys of two key heads, from a fixed distribution with strong and weak directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, HEADS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)) / WIDTH**0.5
    noise = torch.randn(HEADS, GROUPS + 1, length, WIDTH, generator=generator)
    x = scale * (noise[:, :GROUPS] @ mixing[0].unsqueeze(1) + 0.3)
    y = scale * (noise[:, GROUPS] @ mixing[1] - 0.3)
    return Sample(x, y, torch.arange(length), window, is_causal)


def fit_of(family, samples, layer=3):
    """A fit that has not learned yet, with the closed-form parameters of all samples together."""
    keys = torch.cat([s.y for s in samples], 1)
    queries = torch.cat([s.x.flatten(1, 2) for s in samples], 1)
    return LayerFit(family, family.fit(queries, keys), samples, CONFIG, layer)


def attention_matrix(own, name, parameters, layer=3):
    """What `favor_attention` does with the values: its output for the identity, `[Hk, G, R, S]`."""
    eye = torch.eye(own.y.shape[1]).expand(1, HEADS, -1, -1)
    out = favor_attention(
        own.x.flatten(0, 1)[None],
        own.y[None],
        eye,
        features=name,
        num_features=CONFIG.num_features,
        scale=1.0,
        is_causal=own.is_causal,
        layer=layer,
        window=own.window,
        parameters=parameters,
    )
    return out[0].unflatten(0, (HEADS, GROUPS))


def divergence(own, matrix):
    """Mean over rows of KL(softmax || matrix), `[Hk]`, written out."""
    logits = own.x.double() @ own.y.double().unsqueeze(1).transpose(-1, -2)
    if own.is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
    exact = logits.softmax(-1)
    terms = torch.where(exact > 0, exact * (exact.clamp(min=1e-300).log() - matrix.double().clamp(min=1e-300).log()), 0)
    return terms.sum(-1).mean((1, 2))


@each_case
@pytest.mark.parametrize("name", ["gerf", "sderf", "wderf"])
def test_the_divergence_is_that_of_the_attention(name, window, is_causal):
    own = sample(window=window, is_causal=is_causal)
    fit = fit_of(features.get(name), [own])
    noise = torch.randn(HEADS, CONFIG.num_features, generator=torch.Generator().manual_seed(5))
    parameters = replace(fit.parameters, log_weights=noise)
    expected = divergence(own, attention_matrix(own, name, parameters))
    torch.testing.assert_close(fit.divergence(parameters).double(), expected, rtol=1e-4, atol=1e-5)


@each_case
@pytest.mark.parametrize("name", ["gerf", "saderf", "aderf", "sderf", "cderf", "wderf"])
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
    means = [
        torch.stack([divergence(own, attention_matrix(own, name, p)) for own in others]).mean()
        for p in (before, fit.parameters)
    ]
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
        estimates = [
            (pairs[head] * w).sum(-1) for w in (result.proportions / mass[head], found.log_weights[head].double().exp())
        ]
        rows = [e / e.sum() for e in estimates]
        torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=1e-4)


@each_case
def test_parameters_are_refined_head_by_head(window, is_causal):
    samples = [sample(seed=seed, window=window, is_causal=is_causal) for seed in range(4)]
    weights, both = fit_of(features.get("wderf"), samples), fit_of(features.get("wderf"), samples)
    alone, refined = weights.fit(0), both.fit(40)
    assert (both.divergence(refined) < weights.divergence(alone)).all()
    torch.testing.assert_close(alone.transform, weights.parameters.transform)
    eye = torch.eye(WIDTH).expand(HEADS, -1, -1)
    torch.testing.assert_close(refined.transform @ refined.inverse, eye, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [bert, llama])
def test_samples_are_the_real_tokens_of_the_model(make):
    """Padding at either end does not count."""
    model, seen = make(), []
    with torch.no_grad(), observe(model, seen.append):
        model(**{name: tensor for name, tensor in batches()[0].items() if name != "labels"})
    for o in seen:
        found = Sample.of(o, 4)
        assert [s.y.shape[1] for s in found] == [20, 13, 14]
        for number, own in enumerate(found):
            real = o.padding[number]
            torch.testing.assert_close(own.y, o.scale**0.5 * o.key[number][:, real])
            torch.testing.assert_close(own.x.flatten(0, 1), o.scale**0.5 * o.query[number][:, real])
            assert own.window == 4
            assert torch.equal(own.places, torch.arange(own.y.shape[1]))


def calibrated(model, backend="favor#", **options):
    return favor.calibrate(model, batches(), attn_implementation=backend, feature_weights=True, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("backend", "family", "options"),
    [
        ("favor+", "gerf", {}),
        ("favor++", "gerf", {}),
        ("favor#", "sderf", {"features": "sderf"}),
        ("favor#", "wderf", {"refine_steps": 0}),
        ("favor#", "wderf", {"refine_steps": 12}),
    ],
)
@pytest.mark.parametrize("make", [bert, llama])
@pytest.mark.parametrize("window", [0, 8])
def test_the_model_runs_with_its_weights(make, backend, family, options, window):
    model, plain = make(), make()
    calibrated(model, backend, window=window, **options)
    seen = []
    with torch.no_grad():
        with observe(plain, seen.append):
            plain(tokens())
        out = model(tokens())[0]
        # The first layer sees what it saw in the exact model.
        o, module = seen[0], attention_modules(model)[seen[0].layer]
        parameters = stored_parameters(module)
        assert parameters.log_weights.shape == (o.key.shape[1], OPTIONS["num_features"])
        assert parameters.log_weights.std() > 0.01
        expected = favor_attention(
            o.query,
            o.key,
            o.value,
            features=family,
            num_features=OPTIONS["num_features"],
            scale=o.scale,
            layer=o.layer,
            is_causal=o.is_causal,
            window=window,
            parameters=parameters,
        )
        kept = []
        hook = module.register_forward_hook(lambda _, __, result: kept.append(result[0]))
        model(tokens())
        hook.remove()
        flat = expected.transpose(1, 2).flatten(2)
        flat = flat if not hasattr(module, "o_proj") else module.o_proj(flat)
        torch.testing.assert_close(kept[0], flat, rtol=1e-4, atol=1e-5)
        names = [name for name, _ in module.named_buffers() if name == "favor_log_weights"]
        assert names == ["favor_log_weights"]
        module.favor_log_weights.add_(torch.randn_like(module.favor_log_weights))
        assert not torch.allclose(model(tokens())[0], out, atol=1e-3)


@pytest.mark.parametrize("window", [0, 8])
def test_the_future_does_not_change_the_past(window):
    model = calibrated(llama(), window=window, refine_steps=10)
    first, second = tokens(), tokens()
    second[:, 11:] = 3
    with torch.no_grad():
        one, other = model(first).logits, model(second).logits
    assert torch.equal(one[:, :11], other[:, :11])


@pytest.mark.parametrize("backend", ["favor+", "favor#"])
@pytest.mark.parametrize("kind", ["bert", "performer"])
def test_saved_and_loaded(kind, backend, tmp_path):
    model = bert() if kind == "bert" else bert(PerformerBertModel, PerformerBertConfig)
    calibrated(model, backend, window=8, refine_steps=10 if backend == "favor#" else None)
    model.save_pretrained(tmp_path)
    assert sum("favor_log_weights" in name for name in load_file(tmp_path / "model.safetensors")) == 2
    named = {"attn_implementation": backend} if kind == "bert" else {}
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True, **named)
    assert not info["missing_keys"]
    assert not any("favor" in key for key in info["unexpected_keys"])
    with torch.no_grad():
        expected = model(tokens()).last_hidden_state
        assert torch.equal(loaded.eval()(tokens()).last_hidden_state, expected)
        plain = favor.configure(loaded, statistics="batch")(tokens()).last_hidden_state
    assert not torch.allclose(plain, expected, atol=1e-3)


def test_without_statistics_or_with_others_favor_plus_is_plain():
    model = favor.calibrate(bert(), batches(), **OPTIONS)
    with torch.no_grad():
        model.set_attn_implementation("favor+")
        plain = favor.configure(bert(), "favor+", **OPTIONS)
        assert torch.equal(model(tokens())[0], plain(tokens())[0])


def test_weights_are_refused_for_other_directions():
    model = calibrated(bert(), "favor+")
    for change in ({"num_features": 32}, {"seed": 1}, {"orthogonal": False}, {"redraw_interval": 5}):
        favor.configure(model, **{**OPTIONS, "seed": 0, "orthogonal": True, "redraw_interval": 0, **change})
        with pytest.raises(ValueError, match="has weights of features, learned for the directions of num_features=24"):
            model(tokens())
    favor.calibrate(model, batches(), **OPTIONS, orthogonal=False, redraw_interval=0)
    model(tokens())  # calibrated anew, without weights
    assert not any("favor_log_weights" in name for name in model.state_dict())
    assert not any("weights_of" in own for own in model.config.favor_layers.values())


def test_bad_requests_say_what_is_wrong():
    with pytest.raises(ValueError, match="redraw_interval=5 would change; set redraw_interval=0"):
        calibrated(bert(), redraw_interval=5)
    with pytest.raises(ValueError, match="relu features take no weights"):
        calibrated(bert(), "favor_relu")
    with pytest.raises(ValueError, match="refine_steps must be 0 for pos features"):
        calibrated(bert(), "favor+", refine_steps=3)
    with pytest.raises(ValueError, match="at least 0 for cderf and wderf; got -1"):
        calibrated(bert(), refine_steps=-1)
    with pytest.raises(ValueError, match="refine_steps belongs to feature_weights=True"):
        favor.calibrate(bert(), batches(), refine_steps=3, **OPTIONS)
    own = sample()
    fit = fit_of(features.get("sderf"), [own])
    short = replace(fit.parameters, log_weights=torch.zeros(HEADS, 5))
    with pytest.raises(ValueError, match="hold weights of 5 features, and there are 12"):
        attention_matrix(own, "sderf", short)


@pytest.mark.filterwarnings("default")  # tracing runs code of torch that warns
@pytest.mark.parametrize("backend", ["favor+", "favor#"])
def test_compiled_without_graph_breaks(backend):
    model = calibrated(bert(), backend, refine_steps=0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens())[0], model(tokens())[0], rtol=1e-4, atol=1e-5)


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
