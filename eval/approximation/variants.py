"""The variants to compare: backends with their options, as they are written on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from favor import registry
from favor.config import FavorConfig, feature_family
from favor.train.common.program import did_you_mean

MEAN, LOCAL = "mean of V", "window alone"
# Options that the program sets itself, or that do not exist for single heads.
NOT_HERE = ("features", "seed", "statistics", "exact_below", "redraw_interval")


@dataclass(frozen=True)
class Variant:
    """A backend with the options that are compared.

    Attributes:
        backend: "favor+", "favor++", "favor#", ... or one of the baselines MEAN and LOCAL.
        features: features of favor#, None for others.
        num_features: M, 0 for baselines, and where each layer has its own.
        window: tokens of exact blocks, 0 for no blocks.
        folder: a converted model whose stored parameters and settings are used, or None.
        statistics: as in `FavorConfig`.
        more: other options of `FavorConfig` by name.
    """

    backend: str
    features: str | None
    num_features: int
    window: int
    folder: str | None = None
    statistics: str = "batch"
    more: tuple[tuple[str, Any], ...] = ()

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


def chosen_name(budget: float) -> str:
    """Names landmarks with settings that `favor.convert` chose for each layer, for `Variant.folder`."""
    return f"layers=auto, flop_budget={budget:g}"


def variants_of(
    texts: Sequence[str], num_features: Sequence[int], windows: Sequence[int], selected_keys: Sequence[int] = ()
) -> list[Variant]:
    """Lists the baselines, and every backend with every number of features, window and number of selected keys.

    Args:
        texts: backends, as `parse` reads them.
        num_features: for a backend whose text does not set it.
        windows: for a backend whose text does not set it; landmarks have none.
        selected_keys: for landmarks whose text does not set it; empty uses the default of the option.

    Raises:
        ValueError, TypeError: for a backend or an option that does not exist.
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
    """Reads `NAME[:FEATURES][:OPTION=VALUE,...]`, such as `favor#:wderf` or `favor+:num_features=64,window=128`.

    Returns:
        Name of the backend, its features, and the options by name.

    Raises:
        ValueError: for text that is not of this form.
    """
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
    """Makes a variant, and checks its options.

    Args:
        backend: its name.
        features: features of favor#, None for others.
        options: by name, with `num_features` and `window`.
        given: names of options that the user set for this backend; the backend must read them.

    Raises:
        ValueError, TypeError: for a backend or option that does not exist, or an option that the backend does not read.
    """
    if wrong := [name for name in options if name in NOT_HERE]:
        raise ValueError(
            f"{wrong[0]} cannot be set for one of the compared backends; give it as an argument of its own"
        )
    feature_family(backend, FavorConfig.from_dict({"features": features, **options}), given)
    rest = {name: value for name, value in options.items() if name not in ("num_features", "window")}
    return Variant(backend, features, options["num_features"], options["window"], more=tuple(rest.items()))


def _value(text: str) -> Any:
    """Reads a number, True or False, else gives the text itself."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text
