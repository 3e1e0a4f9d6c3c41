"""The right output of attention: float64 formulas for a few query rows, and the check of a method against them.

The formulas share no code with the methods that are timed. A cell is checked on its own inputs, but only for some query
rows of one head, so that a check costs rows x L and never L x L. Its backward pass gets an output gradient that is zero
outside of these rows; then the gradients of all keys and values follow exactly from these rows alone. Landmarks, whose
definition is quadratic, are checked at shorter lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from favor import features as families
from favor.features import Parameters, PositiveFeatures
from favor.landmark.naive import naive_landmark_attention

ROWS = 64
BLOCK = 8192
SEGMENTS = 16
# Largest relative error; half precision rounds each exponent and each weight, float32 only their sums.
TOLERANCE = {"float64": 1e-4, "float32": 5e-4, "float16": 3e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Sample:
    """Some query rows of one head with all keys that they may see, in float64.

    The positions of the queries `[R, d]` are `rows`; keys are `[L, d]`, values `[L, dv]`, and `queries` are all of the
    head `[L, d]`, without gradients. If it is causal, row i sees keys 0 ... i.
    """

    batch: int
    head: int
    rows: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    queries: Tensor
    causal: bool

    @classmethod
    def draw(
        cls, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seed: int = 0, last: bool = False
    ) -> Sample:
        """Draws a sample of query rows, or takes the last row alone.

        Half of the rows grow by powers from row 0 on, where an error in causality is largest; the others are spread
        over the length.
        """
        generator = torch.Generator().manual_seed(seed)
        batch, heads, length = query.shape[:3]
        b, h = (int(torch.randint(size, (), generator=generator)) for size in (batch, heads))
        early = (length ** (torch.arange(ROWS // 2) / (ROWS // 2))).long() - 1
        spread = torch.randint(length, (ROWS // 2 - 1,), generator=generator)
        end = torch.tensor([length - 1])
        rows = (end if last else torch.cat((early, spread, end)).clamp(0, length - 1).unique()).to(query.device)
        queries, keys, values = (tensor[b, h].detach().double() for tensor in (query, key, value))
        leaves = [tensor.requires_grad_() for tensor in (queries[rows], keys, values)]
        return cls(b, h, rows, leaves[0], leaves[1], leaves[2], queries, causal)

    def seen(self, weights: Tensor, hidden: float) -> Tensor:
        """Gives weights `[R, L]` with another value for keys that a row must not see."""
        if not self.causal:
            return weights
        return weights.masked_fill(torch.arange(len(self.key), device=weights.device) > self.rows[:, None], hidden)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Formula = Callable[[Sample], Tensor]


def softmax(sample: Sample) -> Tensor:
    """Computes exact softmax attention with the scale 1/sqrt(d), `[R, dv]`."""
    logits = sample.query @ sample.key.T * sample.query.shape[-1] ** -0.5
    return sample.seen(logits, -torch.inf).softmax(-1) @ sample.value


def features(sample: Sample, name: str, omega: Tensor, window: int = 0) -> Tensor:
    """Computes the estimator of `favor_attention` from its definition, `[R, dv]`: features of rows and keys, weights.

    Directions of the head are `omega`, `[M, d]`; in blocks of `window` tokens weights are exact (0: no blocks).
    """
    family, omega, root = families.get(name), omega.double(), sample.query.shape[-1] ** -0.25
    assert isinstance(family, PositiveFeatures)
    x, y = sample.query * root, sample.key * root
    if sample.causal:  # Statistics of a whole sequence would show a query its future.
        params = Parameters.identity(x.shape[-1], dtype=x.dtype, device=x.device)
    else:
        params = family.fit(sample.queries * root, y.detach())
    of_query = family.log_phi(x, omega, params, side="query")
    top = of_query.detach().amax(-1, keepdim=True)
    weights = (of_query - top).exp()

    def log_weights(keys: Tensor) -> Tensor:
        of_key = family.log_phi(keys, omega, params, side="key")
        high = of_key.detach().amax(-1, keepdim=True)
        return (weights @ (of_key - high).exp().T).log() + high.T

    estimates = _by_blocks(log_weights, y) + top - math.log(len(omega))
    if window:
        blocks = torch.arange(len(y), device=y.device) // window
        estimates = torch.where(sample.rows[:, None] // window == blocks, x @ y.T, estimates)
    return sample.seen(estimates, -torch.inf).softmax(-1) @ sample.value


def landmarks(sample: Sample, means: int, selected: int | None) -> Tensor:
    """Computes attention through landmarks from its definition, `[R, dv]`, in time and memory quadratic in the length.

    M `means` are nodes of keys in encoders, a block reads K `selected` keys exactly; None is the default.
    """
    queries = sample.queries.index_put((sample.rows,), sample.query)
    query, key, value = (tensor.cpu()[None, None] for tensor in (queries, sample.key, sample.value))
    out = naive_landmark_attention(query, key, value, means, is_causal=sample.causal, selected_keys=selected)
    return out[0, 0].to(sample.rows.device)[sample.rows]


def performer(sample: Sample, projection: Tensor) -> Tensor:
    """Computes attention as performer-pytorch 1.1.4 defines it, with both of its epsilons, `[R, dv]`.

    A feature is M^-1/2 (exp(p.x - |x|^2/2 - top) + 1e-4), with x = d^-1/4 times the token and `top` the largest p.x of
    the row for queries, of the whole head for keys. Its causal form adds 1e-6 to each sum of key features.
    """
    projection, root = projection.double(), sample.query.shape[-1] ** -0.25
    x, y = sample.query * root, sample.key * root

    def feature(tokens: Tensor, top: Tensor | None = None) -> Tensor:
        logits = tokens @ projection.T
        top = logits.detach().amax(-1, keepdim=True) if top is None else top
        exponent = logits - tokens.square().sum(-1, keepdim=True) / 2 - top
        return len(projection) ** -0.5 * (exponent.exp() + 1e-4)

    with torch.no_grad():
        top = torch.stack([(block @ projection.T).max() for block in y.split(BLOCK)]).max()
    of_query = feature(x)
    weights = sample.seen(_by_blocks(lambda keys: of_query @ feature(keys, top).T, y), 0.0)
    total = weights.sum(-1) + (1e-6 * of_query.sum(-1) if sample.causal else 0.0)
    return weights @ sample.value / total[:, None]


def _by_blocks(weights: Callable[[Tensor], Tensor], keys: Tensor) -> Tensor:
    """Computes weights `[R, L]` of keys `[L, d]`, some keys at a time; the backward pass computes features again."""
    return torch.cat([checkpoint(weights, block, use_reentrant=False) for block in keys.split(BLOCK)], dim=-1)


@dataclass(frozen=True)
class Check:
    """Outcome of a check."""

    errors: dict[str, float]
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether every error is a number within the tolerance."""
        return all(error <= self.tolerance * (1 if name == "output" else 2) for name, error in self.errors.items())

    @property
    def worst(self) -> str:
        """The largest error in words; NaN counts as the largest."""
        name = max(self.errors, key=lambda n: (math.isnan(self.errors[n]), self.errors[n]))
        return f"relative error {self.errors[name]:.1e} of {name}"


def compare(attend: Attend, formula: Formula, *inputs: Tensor, tolerance: float, **options: Any) -> Check:
    """Runs `attend` once on `[B, H, L, d]` inputs and compares it with a formula in float64.

    The options are those of `Sample.draw`; with `last` the output has the last row alone.

    The error of the output is that of the worst row, |found - expected| / |expected|. The error of a gradient is that
    of the worst sixteenth of the length. Every gradient outside of the sampled head must be zero.
    """
    sample = Sample.draw(*inputs, **options)
    place = (sample.batch, sample.head)
    with torch.set_grad_enabled(inputs[0].requires_grad):
        out, expected = attend(*inputs), formula(sample)
    rows = sample.rows - len(sample.key)  # counted from the end
    error = (out.detach()[place][rows].double() - expected).detach().norm(dim=-1)
    errors = {"output": _largest(error / expected.detach().norm(dim=-1))}
    if inputs[0].requires_grad:
        slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(options.get("seed", 0))).to(out)
        sparse = torch.zeros_like(out)
        sparse[sample.batch, sample.head, sample.rows] = slope
        found = torch.autograd.grad(out, inputs, sparse)
        own = torch.autograd.grad(expected, (sample.query, sample.key, sample.value), slope.double())
        wanted = (torch.zeros_like(sample.queries).index_put((sample.rows,), own[0]), *own[1:])
        for name, gradient, right in zip(("query", "key", "value"), found, wanted, strict=True):
            errors[name] = _worst_segment(gradient, place, right)
    return Check(errors, tolerance)


def _worst_segment(gradient: Tensor, place: tuple[int, int], expected: Tensor) -> float:
    """Computes the largest error of `gradient[place]`, `[L, d]`, by segments of the length, and of zeros elsewhere."""
    size = -(-expected.shape[0] // SEGMENTS)
    parts = zip((gradient[place].double() - expected).split(size), expected.split(size), strict=True)
    errors, norms = map(torch.stack, zip(*((error.norm(), part.norm()) for error, part in parts), strict=True))
    # A far segment may have almost no gradient; its error is then relative to the mean segment.
    floor = 0.1 * expected.norm() / len(norms) ** 0.5
    elsewhere = gradient.detach().clone()
    elsewhere[place] = 0
    stray = elsewhere.float().norm() / expected.norm()
    return _largest(torch.cat([errors / torch.maximum(norms, floor), stray[None]]))


def _largest(errors: Tensor) -> float:
    return float("nan") if errors.isnan().any() else errors.max().item()
