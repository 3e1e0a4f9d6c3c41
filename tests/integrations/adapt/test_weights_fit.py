"""Learning weights of features in one layer: against the attention itself, the mixture it is, and data not seen."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pairwise import pairs
from test_calibrate import batches, bert, llama

from favor import FavorConfig, favor_attention, features
from favor.decomposition import mixture_proportions
from favor.features import Parameters
from favor.integrations.adapt.feature_weights import LayerFit, Sample, fit_weights
from favor.integrations.adapt.observe import observe

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
