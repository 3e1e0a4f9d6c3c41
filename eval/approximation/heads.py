"""Errors of the attention output of every head, on the queries and keys of a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from favor import favor_attention
from favor import features as families
from favor.config import FavorConfig, feature_family
from favor.eval.approximation.variants import LOCAL, MEAN, Variant
from favor.features import Parameters, PositiveFeatures
from favor.integrations.adapt.observe import Observation, relative_error
from favor.integrations.layer import all_exact, layer_options, stored_choice, stored_parameters


@dataclass
class HeadErrors:
    """Measures relative errors of heads, as a callback of `favor.integrations.adapt.observe.observe`.

    Attributes:
        variants: the variants to compare.
        seed: draws the random directions, and the queries if `query_samples` is set.
        query_samples: greatest number of queries whose error counts; one is drawn from each of that many equal parts.
            The backends always compute all queries. None counts all queries.
        converted: attention modules with stored parameters by layer number, for every folder of the variants.
        errors: by variant and layer, one `[H]` per sequence; less is better.
        diagnostics: by name (rho, norms of x and y) and layer, one `[H]` per sequence.
        length: the greatest number of keys of a layer.
    """

    variants: Sequence[Variant]
    seed: int = 0
    query_samples: int | None = None
    converted: dict[str, dict[int, nn.Module]] = field(default_factory=dict)
    errors: dict[Variant, dict[int, list[Tensor]]] = field(default_factory=dict)
    diagnostics: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    length: int = 0

    @torch.no_grad()
    def __call__(self, seen: Observation) -> None:
        """Adds the errors of one layer."""
        places = self._places(seen.query.shape[2], seen.query.device)
        self.length = max(self.length, seen.key.shape[2])
        for variant in self.variants:
            errors = relative_error(self.output(variant, seen, places), seen, places)
            self.errors.setdefault(variant, {}).setdefault(seen.layer, []).extend(errors.cpu().unbind(0))
        for name, values in self._diagnose(seen).items():
            self.diagnostics.setdefault(name, {}).setdefault(seen.layer, []).extend(values.cpu().unbind(0))

    def _places(self, length: int, device: torch.device) -> Tensor:
        """Chooses the queries to measure, at random: with a fixed step all could have one place in their blocks."""
        if self.query_samples is None or self.query_samples >= length:
            return torch.arange(length, device=device)
        generator = torch.Generator().manual_seed(self.seed)
        steps = torch.arange(self.query_samples) + torch.rand(self.query_samples, generator=generator)
        return (steps * (length / self.query_samples)).long().clamp(max=length - 1).to(device)

    def output(self, variant: Variant, seen: Observation, places: Tensor) -> Tensor:
        """Computes the attention output of a variant, `[B, H, n, dv]`.

        Args:
            variant: backend and options.
            seen: queries, keys and values.
            places: of the n queries.
        """
        if variant.backend == MEAN:
            return mean_of_values(seen, places)
        if variant.backend == LOCAL:
            return window_alone(seen, variant.window, places)
        given, choice = variant.options(self.seed), {}
        if variant.folder is not None:
            module = self.converted[variant.folder][seen.layer]
            given, choice = layer_options(module, variant.backend)[1], stored_choice(module)
        if all_exact(choice):
            return seen.output[:, :, places]
        config = FavorConfig.from_dict(given)
        name, options = feature_family(variant.backend, config)
        has_window = families.REGISTRY[name].supports_window
        out = favor_attention(
            seen.query,
            seen.key,
            seen.value,
            features=families.get(name, **options),
            num_features=config.num_features,
            key_padding_mask=seen.padding,
            is_causal=seen.is_causal,
            scale=seen.scale,
            seed=self.seed,
            layer=seen.layer,
            parameters=self._stored(variant, seen.layer, "calibrated"),
            correction=self._stored(variant, seen.layer, "corrected"),
            window=choice.get("window", config.window) if seen.is_self_attention and has_window else 0,
            orthogonal=config.orthogonal,
            selected_keys=config.selected(name, seen.is_causal),
            kernel=config.kernel,
        )
        groups = seen.query.shape[1] // seen.key.shape[1]
        exact = [head for head in range(seen.query.shape[1]) if head // groups in choice.get("exact_heads", ())]
        out[:, exact] = seen.output[:, exact]
        return out[:, :, places]

    def _stored(self, variant: Variant, layer: int, kind: str) -> Parameters | None:
        if variant.folder is None or variant.statistics != kind:
            return None
        return stored_parameters(self.converted[variant.folder][layer])

    def _diagnose(self, seen: Observation) -> dict[str, Tensor]:
        """Computes rho of wDERF, fitted per sequence and head, and root mean squared norms of x and y, `[B, H]`."""
        family = families.get("wderf")
        assert isinstance(family, PositiveFeatures)
        groups = seen.query.shape[1] // seen.key.shape[1]
        key = seen.key.repeat_interleave(groups, 1)
        masks = [None if m is None else m[:, None] for m in (seen.query_padding, seen.padding)]
        moments = family.moments(seen.query, key, *masks, scale=seen.scale, is_causal=seen.is_causal)
        plain = families.Moments.from_samples(seen.query, key, *masks).scaled(seen.scale)
        norms = (torch.diagonal(m, dim1=-2, dim2=-1).sum(-1).sqrt() for m in (plain.second_x, plain.second_y))
        return dict(zip(("rho", "|x|", "|y|"), (family.fit_moments(moments).rho(moments), *norms), strict=True))


def mean_of_values(seen: Observation, places: Tensor | None = None) -> Tensor:
    """Computes uniform attention over the keys that a query sees, `[B, H, n, dv]`; an estimate should be better.

    Args:
        seen: queries, keys and values.
        places: of the queries `[n]`; None is all queries.
    """
    rows, columns = _pairs(seen, places)
    weights = (columns <= rows if seen.is_causal else (columns >= 0).expand(len(rows), -1)).to(seen.value.dtype)[None]
    if seen.padding is not None:
        weights = weights * seen.padding[:, None, :]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    # All heads have equal weights: one product serves all heads, without a copy of the weights per head.
    means = weights @ seen.value.transpose(1, 2).flatten(2)
    means = means.unflatten(2, (seen.value.shape[1], -1)).transpose(1, 2)
    return means.repeat_interleave(seen.query.shape[1] // seen.value.shape[1], 1)


def window_alone(seen: Observation, window: int, places: Tensor | None = None) -> Tensor:
    """Computes exact attention inside blocks, without keys outside of them, `[B, H, n, dv]`.

    Args:
        seen: queries, keys and values.
        window: tokens of a block.
        places: of the queries `[n]`; None is all queries.
    """
    rows, columns = _pairs(seen, places)
    mask = rows // window == columns // window
    if seen.is_causal:
        mask &= columns <= rows
    mask = mask[None, None]
    if seen.padding is not None:
        mask = mask & seen.padding[:, None, None, :]
    query = seen.query if places is None else seen.query[:, :, places]
    return nn.functional.scaled_dot_product_attention(
        query, seen.key, seen.value, attn_mask=mask, scale=seen.scale, enable_gqa=True
    ).nan_to_num(0.0)


def _pairs(seen: Observation, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gives the places of queries `[n, 1]` and keys `[1, S]`, both counted from the first key."""
    length, keys = seen.query.shape[2], seen.key.shape[2]
    places = torch.arange(length, device=seen.query.device) if places is None else places
    return places[:, None] + keys - length, torch.arange(keys, device=seen.query.device)[None]
