"""What is compared: backends with their options, as they are written on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from favor import registry
from favor.config import FavorConfig, feature_family
from favor.landmark import Landmarks

MEAN, LOCAL = "mean of V", "window alone"
# What the program decides itself, or what single heads do not have.
NOT_HERE = ("features", "seed", "statistics", "exact_below", "redraw_interval")


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
        """Whether it can run in a model; the baselines are computed for single heads only."""
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
        """Options of the backend for the whole model: all of them, so that none is left of another variant.

        A converted checkpoint keeps those that are not compared.
        """
        return {
            **({} if self.folder else FavorConfig().to_dict()),
            "features": self.features,
            "num_features": self.num_features,
            "window": self.window,
            "exact_below": 0,
            "seed": seed,
            "statistics": self.statistics,
            **dict(self.more),
        }


def variants_of(
    texts: Sequence[str], num_features: Sequence[int], windows: Sequence[int], selected_keys: Sequence[int] = ()
) -> list[Variant]:
    """Baselines, and every backend with every number of features, window and number of selected keys.

    Args:
        texts: backends, see `parse`.
        num_features, windows: what a backend gets that does not name its own.
        selected_keys: the same for landmarks; other backends have none. Empty leaves the option to its default.

    Raises:
        ValueError, TypeError: for a backend or an option that does not exist.
    """
    found = [Variant(MEAN, None, 0, 0), *(Variant(LOCAL, None, 0, window) for window in windows if window)]
    for text in texts:
        backend, features, options = parse(text)
        lists: dict[str, Sequence[int]] = {"window": windows}
        if selected_keys and issubclass(registry.family_of(backend, features), Landmarks):
            lists["selected_keys"] = selected_keys
        lists["num_features"] = num_features
        choices: list[dict[str, Any]] = [options]
        for name, values in lists.items():
            if name not in options:
                choices = [{**choice, name: value} for choice in choices for value in values]
        found += [variant(backend, features, choice, list(options)) for choice in choices]
    return list(dict.fromkeys(found))


def parse(text: str) -> tuple[str, str | None, dict[str, Any]]:
    """Reads `NAME[:FEATURES][:OPTION=VALUE,...]`, as `favor#:wderf` or `landmark:num_features=64,window=128`.

    Returns:
        Name of the backend, its features, and the options by name.

    Raises:
        ValueError: for text that is not of this form.
    """
    backend, *parts = text.split(":")
    if backend not in registry.BACKENDS:
        raise ValueError(f"a backend must be one of {', '.join(registry.BACKENDS)}; got {text!r}")
    options = [part for part in parts if "=" in part]
    names = [part for part in parts if "=" not in part]
    if len(names) > 1 or len(options) > 1:
        raise ValueError(f"a backend must be written NAME[:FEATURES][:OPTION=VALUE,...], got {text!r}")
    pairs = [word.partition("=") for word in options[0].split(",")] if options else []
    return backend, names[0] if names else None, {name: _value(value) for name, _, value in pairs}


def variant(backend: str, features: str | None, options: Mapping[str, Any], given: Sequence[str] = ()) -> Variant:
    """A backend with options, checked.

    Args:
        backend: its name.
        features: of favor#, None for others.
        options: by name, `num_features` and `window` among them.
        given: options that were asked for with this backend, which it has to read.

    Raises:
        ValueError, TypeError: for a backend or option that does not exist, or an option that the backend does not read.
    """
    if wrong := [name for name in options if name in NOT_HERE]:
        raise ValueError(f"{wrong[0]} is no option of a compared backend; write it as an argument of its own")
    feature_family(backend, FavorConfig.from_dict({"features": features, **options}), given)
    rest = {name: value for name, value in options.items() if name not in ("num_features", "window")}
    return Variant(backend, features, options["num_features"], options["window"], more=tuple(rest.items()))


def _value(text: str) -> Any:
    """A number, True or False, or the text itself."""
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdecimal() else text
