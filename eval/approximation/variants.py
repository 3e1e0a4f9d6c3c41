"""The variants to compare: backends with their options, as they are written on the command line.

Their errors are those of the attention output of every head, on the queries and keys of a real model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from favor import favor_attention, registry
from favor import features as families
from favor.config import FavorConfig, feature_family
from favor.features import Parameters
from favor.integrations.adapt.observe import Observation, relative_error
from favor.integrations.layer import all_exact, layer_options, stored_choice, stored_parameters
from favor.train.common.program import did_you_mean

MEAN, LOCAL = "mean of V", "window alone"
# Options that the program sets itself, or that do not exist for single heads.
NOT_HERE = ("features", "seed", "statistics", "exact_below", "redraw_interval")


@dataclass(frozen=True)
class Variant:
    """A backend with the options that are compared, or one of the baselines MEAN and LOCAL."""

    backend: str
    features: str | None  # of favor#
    num_features: int  # M, 0 for baselines, and where each layer has its own
    window: int  # tokens of exact blocks, 0 for no blocks
    folder: str | None = None  # a converted model whose stored parameters and settings are used
    statistics: str = "batch"
    more: tuple[tuple[str, Any], ...] = ()  # other options of `FavorConfig` by name

    @property
    def is_backend(self) -> bool:
        """Whether the variant can run in a model; the baselines are computed for single heads only."""
        return self.backend not in (MEAN, LOCAL)

    @property
    def label(self) -> str:
        """Name in tables, without M and window."""
        name = self.backend if self.features is None else f"{self.backend}:{self.features}"
        name += ":" * bool(self.more) + ",".join(f"{option}={value}" for option, value in self.more)
        return name if self.folder is None else f"{name} ({self.folder})"

    @property
    def title(self) -> str:
        """Name with M and window, in words."""
        number = f", M = {self.num_features}" if self.num_features else ""
        return self.label + number + (f", window {self.window}" if self.window else "")

    def options(self, seed: int) -> dict[str, Any]:
        """Gives all options of the backend for the whole model, so that no option of another variant stays.

        A converted checkpoint keeps its own options, which those of the variant describe.
        """
        always = {"exact_below": 0, "seed": seed, "statistics": self.statistics}
        if self.folder is not None:
            return always
        compared = {"features": self.features, "num_features": self.num_features, "window": self.window}
        return {**FavorConfig().to_dict(), **always, **compared, **dict(self.more)}


def add_options(parser: argparse.ArgumentParser, compared: Sequence[str], selected_keys: Sequence[int]) -> None:
    """Adds the options that say what is compared, with these defaults."""
    add = parser.add_argument
    backends: dict[str, Any] = {"default": list(compared), "metavar": "NAME[:FEATURES][:OPTION=VALUE,...]"}
    add("--backends", nargs="+", help="backends to compare; options given here replace the lists below", **backends)
    add("--num_features", nargs="+", type=int, default=[64, 128, 256], help="M: random features or landmarks per head")
    add("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks of features; 0: none")
    add("--selected_keys", nargs="+", type=int, default=selected_keys, help="K, selected keys of landmarks; 0: none")
    queries = "greatest number of queries of a sample whose errors count; backends compute all queries"
    add("--query_samples", type=int, default=1024, help=queries)
    add("--seed", type=int, default=0, help="seed of random directions and masks")


def variants_of(
    texts: Sequence[str], num_features: Sequence[int], windows: Sequence[int], selected_keys: Sequence[int] = ()
) -> list[Variant]:
    """Lists the baselines, and every backend with every number of features, window and number of selected keys.

    The lists are for backends whose text, as `parse` reads it, does not set the option; landmarks have no window, and
    an empty `selected_keys` is the default of the option. Raises ValueError or TypeError for what does not exist.
    """
    found = [Variant(MEAN, None, 0, 0), *(Variant(LOCAL, None, 0, window) for window in windows if window)]
    for text in texts:
        backend, features, options = parse(text)
        lists: dict[str, Sequence[int]] = {"window": windows}
        if registry.family_of(backend, features).selects_keys:
            lists = {"window": [0], **({"selected_keys": selected_keys} if selected_keys else {})}
        lists["num_features"] = num_features
        choices: list[dict[str, Any]] = [options]
        for name, values in lists.items():
            if name not in options:
                choices = [{**choice, name: value} for choice in choices for value in values]
        found += [variant(backend, features, choice, list(options)) for choice in choices]
    return list(dict.fromkeys(found))


def parse(text: str) -> tuple[str, str | None, dict[str, Any]]:
    """Reads `NAME[:FEATURES][:OPTION=VALUE,...]`, such as `favor#:wderf` or `favor+:num_features=64,window=128`."""
    backend, *parts = text.split(":")
    if backend not in registry.BACKENDS:
        near = did_you_mean(backend, registry.BACKENDS)
        raise ValueError(f"a backend must be one of {', '.join(registry.BACKENDS)}; got {text!r}{near}")
    options = [part for part in parts if "=" in part]
    names = [part for part in parts if "=" not in part]
    if len(names) > 1 or len(options) > 1:
        raise ValueError(f"a backend must be written NAME[:FEATURES][:OPTION=VALUE,...], got {text!r}")
    pairs = [word.partition("=") for word in options[0].split(",")] if options else []
    return backend, names[0] if names else None, {name: _value(value) for name, _, value in pairs}


def variant(backend: str, features: str | None, options: Mapping[str, Any], given: Sequence[str] = ()) -> Variant:
    """Makes a variant, and checks its options."""
    if wrong := [name for name in options if name in NOT_HERE]:
        own = "give it as an argument of its own"
        raise ValueError(f"{wrong[0]} cannot be set for one of the compared backends; {own}")
    feature_family(backend, FavorConfig.from_dict({"features": features, **options}), given)
    rest = {name: value for name, value in options.items() if name not in ("num_features", "window")}
    return Variant(backend, features, options["num_features"], options["window"], more=tuple(rest.items()))


def _value(text: str) -> Any:
    """Reads a number, True or False, else gives the text itself."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text


@dataclass
class HeadErrors:
    """Measures relative errors of heads, as a callback of `favor.integrations.adapt.observe.observe`.

    The seed draws the random directions, and the queries: at most `query_samples` count, one of each of that many equal
    parts (None: all). The backends always compute all queries.
    """

    variants: Sequence[Variant]
    seed: int = 0
    query_samples: int | None = None
    # Attention modules with stored parameters by layer number, for every folder of the variants.
    converted: dict[str, dict[int, nn.Module]] = field(default_factory=dict)
    # By variant and layer, one `[H]` per sequence; less is better.
    errors: dict[Variant, dict[int, list[Tensor]]] = field(default_factory=dict)
    length: int = 0  # the greatest number of keys of a layer

    @torch.no_grad()
    def __call__(self, seen: Observation) -> None:
        """Adds the errors of one layer."""
        places = self._places(seen.query.shape[2], seen.query.device)
        self.length = max(self.length, seen.key.shape[2])
        for variant in self.variants:
            errors = relative_error(self.output(variant, seen, places), seen, places)
            self.errors.setdefault(variant, {}).setdefault(seen.layer, []).extend(errors.cpu().unbind(0))

    def _places(self, length: int, device: torch.device) -> Tensor:
        """Chooses the queries to measure, at random: with a fixed step all could have one place in their blocks."""
        if self.query_samples is None or self.query_samples >= length:
            return torch.arange(length, device=device)
        generator = torch.Generator().manual_seed(self.seed)
        steps = torch.arange(self.query_samples) + torch.rand(self.query_samples, generator=generator)
        return (steps * (length / self.query_samples)).long().clamp(max=length - 1).to(device)

    def output(self, variant: Variant, seen: Observation, places: Tensor) -> Tensor:
        """Computes the attention output of a variant, `[B, H, n, dv]`."""
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
            relative=seen.relative,
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


def by_head(layers: Mapping[int, list[Tensor]]) -> Tensor:
    """Computes the mean of the errors of a variant over sequences, `[layers, heads]`."""
    return torch.stack([torch.stack(rows).mean(0) for _, rows in sorted(layers.items())])


def mean_of_values(seen: Observation, places: Tensor | None = None) -> Tensor:
    """Computes uniform attention over the keys that a query sees, `[B, H, n, dv]`; an estimate should be better."""
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
    """Computes exact attention inside blocks, without keys outside of them, `[B, H, n, dv]`."""
    rows, columns = _pairs(seen, places)
    mask = rows // window == columns // window
    if seen.is_causal:
        mask &= columns <= rows
    mask = mask[None, None]
    if seen.padding is not None:
        mask = mask & seen.padding[:, None, None, :]
    query, length = (seen.query if places is None else seen.query[:, :, places]), seen.query.shape[2]
    if seen.relative is not None:
        bias = seen.relative.dense(length, seen.key.shape[2])
        mask = (bias if places is None else bias[:, :, places]).masked_fill(~mask, -torch.inf)
    return nn.functional.scaled_dot_product_attention(
        query, seen.key, seen.value, attn_mask=mask, scale=seen.scale, enable_gqa=True
    ).nan_to_num(0.0)


def _pairs(seen: Observation, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gives the places of queries `[n, 1]` and keys `[1, S]`, both counted from the first key."""
    length, keys = seen.query.shape[2], seen.key.shape[2]
    places = torch.arange(length, device=seen.query.device) if places is None else places
    return places[:, None] + keys - length, torch.arange(keys, device=seen.query.device)[None]
