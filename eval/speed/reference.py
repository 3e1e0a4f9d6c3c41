"""The right output of attention: float64 formulas for a few query rows, and the check of a method against them.

The formulas do not share code with the methods that are timed, except for the choice of landmarks. A cell is checked on
its own inputs, but only for some query rows of one head, so that a check costs rows x L and never L x L. Its backward
pass gets an output gradient that is zero outside of these rows; then the gradients of all keys and values follow
exactly from these rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from favor import features as families
from favor.features import Parameters, PositiveFeatures, SignedFeatures

ROWS = 64
BLOCK = 8192
SEGMENTS = 16
# Largest relative error; half precision rounds each exponent and each weight, float32 only their sums.
TOLERANCE = {"float64": 1e-4, "float32": 5e-4, "float16": 3e-2, "bfloat16": 5e-2}
Rows = tuple[Tensor, Tensor | float]


@dataclass(frozen=True)
class Sample:
    """Some query rows of one head with all keys that they may see, in float64.

    Attributes:
        batch, head, key_head: the sequence and the heads that it was taken from.
        rows: positions of the queries, `[R]`.
        query: `[R, d]`.
        key, value: `[L, d]`, `[L, dv]`.
        all_queries: every query that shares the key head, `[G L, d]`, for the statistics.
        tokens: queries and keys of all heads in their own type, `[B, H, L, d]` and `[B, Hk, L, d]`.
        causal: row i sees keys 0 ... i.
    """

    batch: int
    head: int
    key_head: int
    rows: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    all_queries: Tensor
    tokens: tuple[Tensor, Tensor]
    causal: bool

    @classmethod
    def draw(cls, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seed: int = 0) -> Sample:
        """Draws a sample of query rows.

        Half of the rows grow by powers from row 0 on, where an error in causality is largest; the others are spread
        over the length.

        Args:
            query: `[B, H, L, d]`.
            key: `[B, Hk, L, d]`.
            value: `[B, Hk, L, d]`.
            causal: row i sees keys 0 ... i.
            seed: draws head and rows.
        """
        generator = torch.Generator().manual_seed(seed)
        batch, heads, length = query.shape[:3]
        group = heads // key.shape[1]
        b, h = (int(torch.randint(size, (), generator=generator)) for size in (batch, heads))
        early = (length ** (torch.arange(ROWS // 2) / (ROWS // 2))).long() - 1
        spread = torch.randint(length, (ROWS // 2 - 1,), generator=generator)
        rows = torch.cat((early, spread, torch.tensor([length - 1]))).clamp(0, length - 1).unique().to(query.device)

        def leaf(rows_of_head: Tensor) -> Tensor:
            return rows_of_head.detach().double().requires_grad_()

        shared = slice(h // group * group, (h // group + 1) * group)
        return cls(
            batch=b,
            head=h,
            key_head=h // group,
            rows=rows,
            query=leaf(query[b, h, rows]),
            key=leaf(key[b, h // group]),
            value=leaf(value[b, h // group]),
            all_queries=query[b, shared].detach().double().flatten(0, 1),
            tokens=(query.detach(), key.detach()),
            causal=causal,
        )

    @property
    def hidden(self) -> Tensor | None:
        """Booleans `[R, L]`, True for keys that a row must not see; None if all rows see all keys."""
        if not self.causal:
            return None
        return torch.arange(self.key.shape[0], device=self.rows.device) > self.rows[:, None]


def softmax_rows(sample: Sample) -> Rows:
    """Computes exact softmax attention with the scale 1/sqrt(d), `[R, dv]`."""
    logits = sample.query @ sample.key.T * sample.query.shape[-1] ** -0.5
    return softmax_of(logits, sample), 1.0


def favor_rows(sample: Sample, name: str, omega: Tensor, window: int = 0) -> Rows:
    """Computes the estimator of `favor_attention` from its definition: features of rows and keys, then weights.

    Args:
        sample: the rows.
        name: registry name of the features.
        omega: directions of the key head, `[M, d]`.
        window: tokens of the blocks in which weights are exact; 0 for no blocks.

    Returns:
        `[R, dv]`, and for features of any sign `[R]`, the factor by which cancellation in their sums raises errors.
    """
    family = families.get(name)
    omega = omega.double()
    root = sample.query.shape[-1] ** -0.25
    x, y = sample.query * root, sample.key * root
    if isinstance(family, SignedFeatures):
        return _signed_rows(sample, family, x, y, omega)
    if not isinstance(family, PositiveFeatures):
        raise TypeError(f"expected positive or signed features, got {type(family).__name__}; write their formula here.")
    if sample.causal:  # Statistics of a whole sequence would show a query its future.
        params = Parameters.identity(x.shape[-1], dtype=x.dtype, device=x.device)
    else:
        params = family.fit(sample.all_queries * root, y.detach())
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
    return softmax_of(estimates, sample), 1.0


def _signed_rows(sample: Sample, family: SignedFeatures, x: Tensor, y: Tensor, omega: Tensor) -> Rows:
    of_query = family.phi(x, omega)
    log_scale = family.log_scale(y)
    scale = (log_scale - log_scale.detach().max()).exp()
    weights = _by_blocks(lambda keys: of_query @ family.phi(keys, omega).T, y) * scale
    with torch.no_grad():
        sizes = _by_blocks(lambda keys: of_query.abs() @ family.phi(keys, omega).abs().T, y) * scale
    if sample.hidden is not None:
        weights, sizes = weights.masked_fill(sample.hidden, 0.0), sizes.masked_fill(sample.hidden, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights @ sample.value / total, sizes.sum(-1) / total.detach().abs()[:, 0]


def performer_rows(sample: Sample, projection: Tensor) -> Rows:
    """Computes attention as performer-pytorch 1.1.4 defines it, with both of its epsilons.

    A feature is M^-1/2 (exp(p.x - |x|^2/2 - top) + 1e-4), with x = d^-1/4 times the token and `top` the largest p.x of
    the row for queries, of the whole head for keys. Its causal form adds 1e-6 to each sum of key features.

    Args:
        sample: the rows.
        projection: rows p, `[M, d]`.
    """
    projection = projection.double()
    ratio = projection.shape[0] ** -0.5
    root = sample.query.shape[-1] ** -0.25
    x, y = sample.query * root, sample.key * root

    def feature(tokens: Tensor, top: Tensor | None) -> Tensor:
        logits = tokens @ projection.T
        top = logits.detach().amax(-1, keepdim=True) if top is None else top
        return ratio * ((logits - tokens.square().sum(-1, keepdim=True) / 2 - top).exp() + 1e-4)

    with torch.no_grad():
        top = torch.stack([(block @ projection.T).max() for block in y.split(BLOCK)]).max()
    of_query = feature(x, None)
    weights = _by_blocks(lambda keys: of_query @ feature(keys, top).T, y)
    if sample.hidden is None:
        return weights @ sample.value / weights.sum(-1, keepdim=True), 1.0
    weights = weights.masked_fill(sample.hidden, 0.0)
    return weights @ sample.value / (weights.sum(-1) + 1e-6 * of_query.sum(-1))[:, None], 1.0


def linear_rows(sample: Sample) -> Rows:
    """Computes linear attention with the identity map and no normaliser: sum over keys of (q.k / sqrt(d)) v."""
    weights = sample.query @ sample.key.T * sample.query.shape[-1] ** -0.5
    if sample.hidden is not None:
        weights = weights.masked_fill(sample.hidden, 0.0)
    return weights @ sample.value, 1.0


def softmax_of(logits: Tensor, sample: Sample) -> Tensor:
    """Computes the mean of the values with softmax weights, `[R, dv]`, from logits `[R, L]` of all keys."""
    if sample.hidden is not None:
        logits = logits.masked_fill(sample.hidden, -torch.inf)
    return logits.softmax(-1) @ sample.value


def _by_blocks(weights: Callable[[Tensor], Tensor], keys: Tensor) -> Tensor:
    """Computes weights `[R, L]` of keys `[L, d]`, some keys at a time; the backward pass computes features again."""
    return torch.cat([checkpoint(weights, block, use_reentrant=False) for block in keys.split(BLOCK)], dim=-1)


@dataclass(frozen=True)
class Check:
    """Outcome of a check.

    Attributes:
        errors: relative errors by name: "output", and with a backward pass "query", "key", "value".
        tolerance: the largest error allowed; twice as much for gradients.
    """

    errors: dict[str, float]
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether every error is a number within the tolerance."""
        return all(error <= self.tolerance * (1 if name == "output" else 2) for name, error in self.errors.items())

    @property
    def worst(self) -> str:
        """The largest error in words; NaN counts as the largest."""
        name = max(self.errors, key=lambda n: (self.errors[n] != self.errors[n], self.errors[n]))
        return f"relative error {self.errors[name]:.1e} of {name}"

    def to_dict(self) -> dict[str, Any]:
        """Gives a plain dictionary for JSON."""
        return asdict(self)


def compare(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    rows: Callable[[Sample], Rows],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    backward: bool,
    factor: float = 1.0,
    seed: int = 0,
) -> Check:
    """Runs `attend` once on `[B, H, L, d]` inputs and compares it with `rows` in float64.

    The error of the output is that of the worst row, |found - expected| / |expected|. The error of a gradient is that
    of the worst sixteenth of the length. Every gradient outside of the sampled head must be zero.

    Args:
        attend: the function to check, `(query, key, value) -> [B, H, L, dv]`.
        rows: the formula that gives the right output.
        query, key, value: the inputs of the cell; they require gradients if `backward`.
        causal, backward: direction and pass of the cell.
        factor: factor of the tolerance, for methods that compute in half precision throughout.
        seed: draws the rows and the output gradient.
    """
    sample = Sample.draw(query, key, value, causal=causal, seed=seed)
    place = (sample.batch, sample.head)
    expected, condition = rows(sample)
    tolerance = factor * TOLERANCE[str(query.dtype).removeprefix("torch.")]
    if not backward:
        with torch.no_grad():
            out = attend(query, key, value)
        return Check({"output": _worst_row(out[place][sample.rows], expected, condition)}, tolerance)
    out = attend(query, key, value)
    generator = torch.Generator().manual_seed(seed)
    slope = torch.randn(expected.shape, generator=generator).to(out)
    sparse = torch.zeros_like(out)
    sparse[place[0], place[1], sample.rows] = slope
    found = torch.autograd.grad(out, (query, key, value), sparse)
    wanted = torch.autograd.grad(expected, (sample.query, sample.key, sample.value), slope.double())
    full = torch.zeros(query.shape[2:], dtype=torch.float64, device=query.device)
    full[sample.rows] = wanted[0]
    errors = {"output": _worst_row(out.detach()[place][sample.rows], expected.detach(), condition)}
    strength = condition if isinstance(condition, float) else condition.max().item()
    key_place = (sample.batch, sample.key_head)
    pairs = (("query", found[0], place, full), ("key", found[1], key_place, wanted[1]))
    for name, gradient, where, reference in (*pairs, ("value", found[2], key_place, wanted[2])):
        errors[name] = _worst_segment(gradient, where, reference) / strength
    return Check(errors, tolerance)


def _worst_row(found: Tensor, expected: Tensor, condition: Tensor | float) -> float:
    error = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return _largest(error / condition)


def _worst_segment(gradient: Tensor, place: tuple[int, int], expected: Tensor) -> float:
    """Computes the largest error of `gradient[place]`, `[L, d]`, by segments of the length, and of zeros elsewhere."""
    size = -(-expected.shape[0] // SEGMENTS)
    parts = zip((gradient[place].double() - expected).split(size), expected.split(size), strict=True)
    errors, norms = zip(*((difference.norm(), part.norm()) for difference, part in parts), strict=True)
    # A far segment may have almost no gradient; its error is then relative to the mean segment.
    floor = 0.1 * expected.norm() / len(norms) ** 0.5
    elsewhere = gradient.detach().clone()
    elsewhere[place] = 0
    stray = elsewhere.float().norm() / expected.norm()
    return _largest(torch.stack((*(e / torch.maximum(n, floor) for e, n in zip(errors, norms, strict=True)), stray)))


def _largest(errors: Tensor) -> float:
    return float("nan") if errors.isnan().any() else errors.max().item()
