"""Weights of random features, and parameters that go with them, learned so that attention comes close to softmax.

For fixed directions the weights that minimise the generalised Kullback-Leibler divergence between softmax attention and
its estimate are the proportions of a mixture, a convex problem (`favor.decomposition.mixture_proportions`): component m
is the matrix f_1m(x_i) f_2m(y_j) / z_i over all pairs of tokens, with z_i the sum of row i. An exact window is one more
component. For the dense families G, L and b are learned too, by gradient steps on the same divergence.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from favor.attention.directions import Draw, directions
from favor.config import FavorConfig
from favor.decomposition.mixture import fit_proportions
from favor.features import Parameters, PositiveFeatures
from favor.integrations.adapt.observe import Observation
from favor.integrations.layer import stored_choice

SEQUENCES, ROWS = 16, 128  # of a layer, and queries of a sequence, at most
SHIFT = 0.05
ROUNDS, ITERATIONS = 3, 20  # of z and, for given z, of the mixture
STEPS_BETWEEN, ITERATIONS_BETWEEN = 25, 5  # gradient steps between two short fits of the weights
UNDERFLOW = 1e-30  # least sum of a row, relative to its largest feature
LEARNING_RATE, LAST_SHARE = 1e-2, 0.05  # of Adam, falling linearly to a share


@dataclass(frozen=True)
class Sample:
    """Queries and keys of a layer in one sequence, without padding, times the root of the scale of the logits.

    Attributes:
        x: `[Hk, G, R, d]`: of the G query heads of each key head, R queries, evenly spaced.
        y: `[Hk, S, d]`.
        places: the positions of the queries among the keys, `[R]`.
        window: length of exact blocks, 0 for none.
        is_causal: whether queries see earlier keys only.
    """

    x: Tensor
    y: Tensor
    places: Tensor
    window: int
    is_causal: bool

    @classmethod
    def of(cls, seen: Observation, number: int, window: int) -> Sample | None:
        """Takes one sequence, by its number, from a call of a layer to the CPU; gives None if it has no tokens."""
        x, y = (rows[number] for rows in (seen.query, seen.key))
        if seen.padding is not None:
            y = y[:, seen.padding[number]]
        if seen.query_padding is not None:
            x = x[:, seen.query_padding[number]]
        if min(x.shape[1], y.shape[1]) == 0:
            return None
        rows = (torch.arange(min(x.shape[1], ROWS)) * max(1.0, x.shape[1] / ROWS)).long()
        places = rows + y.shape[1] - x.shape[1]  # queries are those of the last tokens
        x = x[:, rows.to(x.device)].unflatten(0, (y.shape[0], -1))
        x, y = ((seen.scale**0.5 * part.float()).cpu() for part in (x, y))
        return cls(x, y, places, window if seen.is_self_attention else 0, seen.is_causal)

    @property
    def visible(self) -> Tensor | None:
        """Boolean `[R, S]`: which keys a query sees; None for all."""
        if not self.is_causal:
            return None
        return torch.arange(self.y.shape[1], device=self.y.device) <= self.places.unsqueeze(-1)

    @property
    def near(self) -> Tensor | None:
        """Boolean `[R, S]`: which keys are in the block of a query; None without a window."""
        if not self.window:
            return None
        blocks = torch.arange(self.y.shape[1], device=self.y.device) // self.window
        same = blocks == (self.places // self.window).unsqueeze(-1)
        return same if self.visible is None else same & self.visible

    def logits(self) -> Tensor:
        """Computes x . y, `[Hk, G, R, S]`, -inf where hidden."""
        logits = self.x @ self.y.unsqueeze(1).transpose(-1, -2)
        return logits if self.visible is None else logits.masked_fill(~self.visible, -torch.inf)


class Samples:
    """Some sequences of each layer, as a callback of `observe`.

    Every sequence of every call of a layer has the same chance to be kept, so that a layer used at several depths
    is seen at all of them. Layers without a window of their own have `window`.
    """

    def __init__(self, window: int) -> None:
        self.window, self.layers = window, defaultdict[int, list[Sample]](list)
        self._calls, self._random = Counter[int](), random.Random(0)

    def __call__(self, seen: Observation) -> None:
        """Keeps or drops each sequence of one call of a layer."""
        window = stored_choice(seen.module).get("window", self.window)
        for number in range(seen.key.shape[0]):
            before = self._calls[seen.layer]
            place = before if before < SEQUENCES else self._random.randrange(before + 1)
            if place < SEQUENCES:
                sample = Sample.of(seen, number, window)
                if sample is None:
                    continue
                self.layers[seen.layer][place : place + 1] = [sample]
            self._calls[seen.layer] += 1


@dataclass(frozen=True)
class _Estimate:
    """The estimate of a sequence's attention, as factors; every row has a scale of its own.

    Attributes:
        query: features of the queries, `[Hk, G, R, M]`; key: of the keys, `[Hk, 1, S, M]`.
        far: `[R, S]`, 1 where the features count and 0 where not; None for everywhere.
        near: exact part, `[Hk, G, R, S]`; None without a window.
    """

    query: Tensor
    key: Tensor
    far: Tensor | None
    near: Tensor | None

    def matrix(self, weights: Tensor | None = None, near: Tensor | None = None) -> Tensor:
        """Gives unnormalised attention `[Hk, G, R, S]`, weighted by `[Hk, M]`, the exact part by a factor `[Hk]`."""
        query = self.query if weights is None else self.query * weights[:, None, None]
        product = query @ self.key.transpose(-1, -2)
        product = product if self.far is None else product * self.far
        if self.near is None:
            return product
        return product + (self.near if near is None else self.near * near[:, None, None, None])


def fit_weights(
    features: PositiveFeatures,
    parameters: Parameters,
    samples: Sequence[Sample],
    config: FavorConfig,
    layer: int,
    steps: int,
    *,
    exact_heads: Sequence[int] = (),
    device: torch.device | str = "cpu",
) -> Parameters:
    """Fits the parameters of a layer, given without weights, with weights: `[Hk, d, d]` and `[Hk, M]`.

    There is at least one sample. Config and layer give the number, seed and kind of the directions; `steps` are
    gradient steps on G, L and b, and 0 learns the weights alone. Key heads that stay exact need no weights.
    """
    heads, _, head_dim = samples[0].y.shape
    if all(sample.window >= sample.y.shape[1] for sample in samples):
        raise ValueError(f"no sequence of the data is longer than window={samples[0].window}; pass longer ones.")
    eye = torch.eye(head_dim).expand(heads, -1, -1)
    parameters = parameters.to(eye)
    matrices = {name: getattr(parameters, name).expand_as(eye) for name in ("transform", "inverse", "factor")}
    shift = None if parameters.shift is None else parameters.shift.expand_as(eye[..., 0])
    whole = replace(parameters, shift=shift, log_weights=torch.zeros(heads, config.num_features), **matrices)
    linear = [head for head in range(heads) if head not in exact_heads]
    if not linear:
        return whole
    own = [replace(s, x=s.x[linear].to(device), y=s.y[linear].to(device), places=s.places.to(device)) for s in samples]
    found = LayerFit(features, whole.heads(linear).to(own[0].y), own, config, layer).fit(steps).to(eye)
    places = torch.tensor(linear)
    for name in ("transform", "inverse", "factor", "shift", "log_weights"):
        part = getattr(whole, name)
        if part is not None:
            whole = replace(whole, **{name: part.index_copy(0, places, getattr(found, name))})
    return replace(whole, maps=found.maps)


class LayerFit:
    """Learns weights and parameters, from those given, for the heads of a layer that are estimated."""

    def __init__(
        self,
        features: PositiveFeatures,
        parameters: Parameters,
        samples: Sequence[Sample],
        config: FavorConfig,
        layer: int,
    ) -> None:
        self.features, self.parameters, self.samples = features, parameters, samples
        heads, _, head_dim = samples[0].y.shape
        # These are the directions that `favor_attention` draws for this number of heads.
        numbers = (config.num_features, head_dim, heads, config.orthogonal, config.seed, layer, 0)
        self.omega = directions(Draw(features.draws_like, *numbers, samples[0].y.device, torch.float32))
        self.targets = [sample.logits().softmax(-1) for sample in samples]

    @torch.no_grad()
    def fit(self, steps: int) -> Parameters:
        """Learns parameters, with a number of gradient steps, and gives for each head the best that were met."""
        if steps:
            return self._refined(self.weighted(self.parameters, ITERATIONS_BETWEEN), steps)
        found = self.parameters
        for _ in range(ROUNDS):
            found = self.weighted(found, ITERATIONS)
        return _better(found, self.divergence(found), self.parameters, self.divergence(self.parameters))[0]

    def divergence(self, parameters: Parameters) -> Tensor:
        """Computes the mean over queries of KL(softmax row || estimated row), `[Hk]`."""
        rows = sum(target[0, :, :, 0].numel() for target in self.targets)
        pairs = zip(self.samples, self.targets, strict=True)
        return sum((self._divergence(s, t, parameters) for s, t in pairs), torch.zeros(())) / rows  # type: ignore[return-value]

    def weighted(self, parameters: Parameters, iterations: int) -> Parameters:
        """Improves the weights of parameters by a number of iterations of the mixture."""
        keys = [self.features.log_phi(s.y, self.omega, parameters, "key").amax(-2, keepdim=True) for s in self.samples]
        top = torch.stack(keys).amax(0)  # of all sequences, [Hk, 1, M]
        estimates = [self._estimate(sample, parameters, top) for sample in self.samples]
        # Rows are divided once by their sums under the present weights.
        scaled = []
        for own in estimates:
            z = own.matrix().sum(-1, keepdim=True)
            share = torch.where(z > UNDERFLOW, 1 / z, 0.0)  # a row whose sum underflows says nothing
            scaled.append(replace(own, query=own.query * share, near=None if own.near is None else own.near * share))
        mass = torch.stack([self._mass(own) for own in scaled]).sum(0)  # of every component, [Hk, M (+ 1)]
        divisor = mass.clamp(min=torch.finfo(mass.dtype).tiny)
        size = parameters.factor.new_tensor([t.shape[1] * t.shape[2] * t.shape[3] for t in self.targets]).sum()

        def split(pi: Tensor) -> tuple[Tensor, Tensor | None]:
            factors = pi / divisor
            number = self.omega.shape[-2]
            return factors[:, :number], factors[:, number] if factors.shape[1] > number else None

        def times(pi: Tensor) -> Tensor:
            # Every component sums to the number of pairs, so that values are of order 1.
            return torch.cat([size * own.matrix(*split(pi)).flatten(1) for own in scaled], dim=1)

        def transposed_times(ratios: Tensor) -> Tensor:
            parts = ratios.split([target[0].numel() for target in self.targets], dim=1)
            sums = [self._mass(own, r.view_as(t)) for own, r, t in zip(scaled, parts, self.targets, strict=True)]
            return size * torch.stack(sums).sum(0) / divisor

        counts = torch.cat([target.flatten(1) for target in self.targets], dim=1)
        result = fit_proportions(
            times, transposed_times, counts, mass, SHIFT, guard=True, tol=1e-5, max_iter=iterations
        )
        weights, near = split(result.proportions)
        # The exact part has the weight 1; without an exact part a common factor changes nothing.
        common = weights.amax(-1) if near is None else near
        change = (weights / common.unsqueeze(-1)).clamp(min=torch.finfo(weights.dtype).tiny).log()
        # A feature without a part in any row keeps its weight.
        change = torch.where(change.isfinite() & (mass[:, : change.shape[1]] > 0), change, 0.0)
        assert parameters.log_weights is not None
        return replace(parameters, log_weights=parameters.log_weights + change)

    def _refined(self, base: Parameters, steps: int) -> Parameters:
        """Takes gradient steps on corrections of G, L and b, with short fits of the weights between them."""
        if base.shift is None:
            base = replace(base, shift=torch.zeros_like(base.factor[..., 0]))
        start = (self.parameters, self.divergence(self.parameters))
        best, least = _better(base, self.divergence(base), *start)
        eye = torch.eye(base.factor.shape[-1], device=base.factor.device)
        transform, factor = (torch.zeros_like(base.factor, requires_grad=True) for _ in range(2))
        shift = torch.zeros_like(base.factor[..., 0], requires_grad=True)
        optimizer = torch.optim.Adam([transform, factor, shift], lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, LAST_SHARE, steps)
        log_weights = base.log_weights

        def present(log_weights: Tensor | None) -> Parameters:
            correction = Parameters(eye + transform, torch.linalg.inv(eye + transform), eye + factor, shift=shift)
            return replace(base.corrected(correction), log_weights=log_weights)

        for step in range(steps):
            number = step % len(self.samples)
            with torch.enable_grad():
                loss = self._divergence(self.samples[number], self.targets[number], present(log_weights)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if (step + 1) % STEPS_BETWEEN and step + 1 < steps:
                continue
            found = self.weighted(present(log_weights), ITERATIONS if step + 1 == steps else ITERATIONS_BETWEEN)
            log_weights = found.log_weights
            best, least = _better(found, self.divergence(found), best, least)
        return best

    def _estimate(self, sample: Sample, parameters: Parameters, top: Tensor | None = None) -> _Estimate:
        query = self.features.log_phi(sample.x.flatten(1, 2), self.omega, parameters, "query")
        query = query.unflatten(1, sample.x.shape[1:3]) - math.log(self.omega.shape[-2])  # [Hk, G, R, M]
        key = self.features.log_phi(sample.y, self.omega, parameters, "key")
        top = key.detach().amax(-2, keepdim=True) if top is None else top
        query = query + top.unsqueeze(1)
        largest, far, near = query.detach().amax(-1, keepdim=True), sample.visible, sample.near
        if near is not None:
            logits = sample.logits().masked_fill(~near, -torch.inf)
            largest = torch.maximum(largest, logits.amax(-1, keepdim=True))
            far, near = ~near if far is None else far & ~near, (logits - largest).exp()
        far = None if far is None else far.to(query)
        return _Estimate((query - largest).exp(), (key - top).exp().unsqueeze(1), far, near)

    def _divergence(self, sample: Sample, target: Tensor, parameters: Parameters) -> Tensor:
        """Computes the sum over queries of KL(softmax row || estimated row), `[Hk]`."""
        matrix = self._estimate(sample, parameters).matrix()
        least = torch.finfo(matrix.dtype).tiny
        rows = matrix / matrix.sum(-1, keepdim=True).clamp(min=least)
        entropy = torch.special.xlogy(target, target)
        return (entropy - target * rows.clamp(min=least).log()).sum((1, 2, 3))

    @staticmethod
    def _mass(own: _Estimate, ratios: Tensor | None = None) -> Tensor:
        """Sums every component over all pairs, times ratios `[Hk, G, R, S]`: `[Hk, M]`, and the exact part's last."""
        if ratios is None:
            seen = own.key.sum(-2, keepdim=True) if own.far is None else own.far @ own.key
        else:
            seen = (ratios if own.far is None else ratios * own.far) @ own.key
        mass = (own.query * seen).sum((1, 2))
        if own.near is None:
            return mass
        exact = own.near if ratios is None else own.near * ratios
        return torch.cat([mass, exact.sum((1, 2, 3)).unsqueeze(-1)], dim=-1)


def _better(found: Parameters, reached: Tensor, other: Parameters, least: Tensor) -> tuple[Parameters, Tensor]:
    """Gives the better parameters of each head and their divergence `[Hk]`; what is not finite never wins."""
    better = (reached < least) | (reached.isfinite() & ~least.isfinite())

    def choose(name: str) -> Tensor:
        one, two = getattr(found, name), getattr(other, name)
        return torch.where(better.view(-1, *[1] * (one.ndim - 1)), one, two)

    shift = None if found.shift is None else choose("shift")
    matrices = choose("transform"), choose("inverse"), choose("factor")
    chosen = Parameters(*matrices, maps=found.maps, shift=shift, log_weights=choose("log_weights"))
    return chosen, torch.where(better, reached, least)
