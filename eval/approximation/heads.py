"""How far the attention output of every head is from exact softmax, on the queries and keys of a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from favor import favor_attention
from favor import features as families
from favor.config import FavorConfig, feature_family
from favor.features import Parameters, PositiveFeatures
from favor.integrations.adapt.observe import Observation
from favor.integrations.layer import stored_choice, stored_parameters
from favor.train.text.attention_student import relative_error

MEAN, LOCAL = "mean of V", "window alone"


@dataclass(frozen=True)
class Variant:
    """A backend with the options that are compared.

    Attributes:
        backend: "favor+", "favor++", "favor#", ... or one of the baselines MEAN and LOCAL.
        features: of favor#, None for others.
        num_features: M, 0 for baselines.
        window: length of exact blocks, 0 for none.
        folder: a converted checkpoint whose stored parameters are used, or None.
        statistics: as in `FavorConfig`.
    """

    backend: str
    features: str | None
    num_features: int
    window: int
    folder: str | None = None
    statistics: str = "batch"

    @property
    def label(self) -> str:
        """Name in tables, without M and window."""
        name = self.backend if self.features is None else f"{self.backend}:{self.features}"
        return name if self.folder is None else f"{name} ({self.folder})"

    def options(self, seed: int) -> dict[str, Any]:
        """Options of the backend for the whole model."""
        return {
            "features": self.features,
            "num_features": self.num_features,
            "window": self.window,
            "exact_below": 0,
            "seed": seed,
            "statistics": self.statistics,
        }


@dataclass
class HeadErrors:
    """Relative errors of heads, as a callback of `favor.integrations.adapt.observe.observe`.

    Attributes:
        variants: what is compared.
        seed: of the random directions.
        converted: attention modules with stored parameters by layer number, for every folder of the variants.
        errors: by variant and layer, one `[H]` for each sequence.
        diagnostics: by layer, one `[H]` for each sequence of rho and of the norms of x and y.
    """

    variants: Sequence[Variant]
    seed: int = 0
    converted: dict[str, dict[int, nn.Module]] = field(default_factory=dict)
    errors: dict[Variant, dict[int, list[Tensor]]] = field(default_factory=dict)
    diagnostics: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, seen: Observation) -> None:
        """Adds the errors of one layer."""
        for variant in self.variants:
            rows = relative_error(self.output(variant, seen), seen)
            self.errors.setdefault(variant, {}).setdefault(seen.layer, []).extend(rows.cpu().unbind(0))
        for name, values in self._diagnose(seen).items():
            self.diagnostics.setdefault(name, {}).setdefault(seen.layer, []).extend(values.cpu().unbind(0))

    def output(self, variant: Variant, seen: Observation) -> Tensor:
        """Attention output of a variant, `[B, H, L, dv]`."""
        if variant.backend == MEAN:
            return mean_of_values(seen)
        if variant.backend == LOCAL:
            return window_alone(seen, variant.window)
        name, options = feature_family(variant.backend, FavorConfig(features=variant.features))
        parameters, choice = self._stored(variant, seen.layer, "calibrated"), {}
        family = families.get(name, **options)
        if variant.folder is not None:
            choice = stored_choice(self.converted[variant.folder][seen.layer])
        out = favor_attention(
            seen.query,
            seen.key,
            seen.value,
            features=family,
            num_features=variant.num_features,
            key_padding_mask=seen.padding,
            is_causal=seen.is_causal,
            scale=seen.scale,
            seed=self.seed,
            layer=seen.layer,
            parameters=parameters,
            correction=self._stored(variant, seen.layer, "corrected"),
            window=choice.get("window", variant.window) if seen.is_self_attention else 0,
        )
        groups = seen.query.shape[1] // seen.key.shape[1]
        exact = [head for head in range(seen.query.shape[1]) if head // groups in choice.get("exact_heads", ())]
        out[:, exact] = seen.output[:, exact]
        return out

    def _stored(self, variant: Variant, layer: int, kind: str) -> Parameters | None:
        if variant.folder is None or variant.statistics != kind:
            return None
        return stored_parameters(self.converted[variant.folder][layer])

    def _diagnose(self, seen: Observation) -> dict[str, Tensor]:
        """Rho of wDERF fitted to each sequence and head, and root mean squared norms of x and y, `[B, H]`."""
        family = families.get("wderf")
        assert isinstance(family, PositiveFeatures)
        groups = seen.query.shape[1] // seen.key.shape[1]
        key = seen.key.repeat_interleave(groups, 1)
        masks = [None if m is None else m[:, None] for m in (seen.query_padding, seen.padding)]
        moments = family.moments(seen.query, key, *masks, scale=seen.scale, is_causal=seen.is_causal)
        plain = families.Moments.from_samples(seen.query, key, *masks).scaled(seen.scale)
        norms = (torch.diagonal(m, dim1=-2, dim2=-1).sum(-1).sqrt() for m in (plain.second_x, plain.second_y))
        return dict(zip(("rho", "|x|", "|y|"), (family.fit_moments(moments).rho(moments), *norms), strict=True))


def mean_of_values(seen: Observation) -> Tensor:
    """Uniform attention over the keys a query sees: what any estimate has to beat."""
    length, keys = seen.query.shape[2], seen.key.shape[2]
    weights = seen.query.new_ones(seen.query.shape[0], 1, length, keys)
    if seen.padding is not None:
        weights = weights * seen.padding[:, None, None, :]
    if seen.is_causal:
        weights = weights.tril(keys - length)
    values = seen.value.repeat_interleave(seen.query.shape[1] // seen.value.shape[1], 1)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1) @ values


def window_alone(seen: Observation, window: int) -> Tensor:
    """Exact attention inside blocks, and nothing outside."""
    length, keys = seen.query.shape[2], seen.key.shape[2]
    rows = torch.arange(length, device=seen.query.device) + keys - length
    columns = torch.arange(keys, device=seen.query.device)
    mask = rows[:, None] // window == columns // window
    if seen.is_causal:
        mask &= columns <= rows[:, None]
    mask = mask[None, None]
    if seen.padding is not None:
        mask = mask & seen.padding[:, None, None, :]
    return nn.functional.scaled_dot_product_attention(
        seen.query, seen.key, seen.value, attn_mask=mask, scale=seen.scale, enable_gqa=True
    ).nan_to_num(0.0)
