"""Checks of `config.favor_layers` and `config.favor_parts`, which come from files and may hold anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from favor import registry
from favor.config import BACKEND, MOST_FEATURES, MOST_HEADS, MOST_TOKENS, FavorConfig

_WIDEST = 2**14  # of a head
_SIZES = {"key_heads": MOST_HEADS, "head_dim": _WIDEST, "num_features": MOST_FEATURES, "directions": MOST_FEATURES}
_SPANS, _COUNTS, _SWITCHES = ("window", "selected_keys"), ("layer", "seed"), ("orthogonal", "maps")
_NAMES = {"family": lambda: registry.FAMILIES, "kind": lambda: ("calibrated", "corrected")}


def check_entries(entries: Any) -> None:
    """Raises a ValueError for entries of layers that are malformed.

    Args:
        entries: value of `config.favor_layers`; None if there is none. See `favor.integrations.stored` for its fields.

    Raises:
        ValueError: naming the layer, the field, what was expected and what came.
    """
    if entries is not None and not isinstance(entries, Mapping):
        raise ValueError(f"config.favor_layers must be a dictionary of layers by name, got {entries!r}.")
    for layer, entry in (entries or {}).items():
        stores = isinstance(entry, Mapping) and "family" in entry
        _check_fields(f'config.favor_layers["{layer}"]', entry, ("kind", "key_heads", "head_dim") if stores else ())


def check_parts(parts: Any) -> None:
    """Raises a ValueError for options of parts of a model, `config.favor_parts`, that are malformed; None is fine."""
    if parts is not None and not isinstance(parts, Mapping):
        raise ValueError(f"config.favor_parts must be a dictionary of options by part, got {parts!r}.")
    for part, options in (parts or {}).items():
        if not isinstance(options, Mapping) or not isinstance(options.get(BACKEND), str):
            raise ValueError(f'config.favor_parts["{part}"] must be a dictionary with {BACKEND}, got {options!r}.')
        FavorConfig.from_dict(options)


def _check_fields(where: str, entry: Any, needed: Collection[str]) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a dictionary, got {entry!r}.")
    missing = [name for name in needed if name not in entry]
    if missing:
        raise ValueError(f"{where} needs {', '.join(needed)}; {', '.join(missing)} is missing.")
    for name, value in entry.items():
        if name in _NAMES:
            expected = " or ".join(map(repr, _NAMES[name]()))
            fits = isinstance(value, str) and value in _NAMES[name]()
        elif name in _SIZES:
            expected, fits = f"an integer from 1 to {_SIZES[name]}", _is_integer(value, 1, _SIZES[name])
        elif name in _SPANS:
            expected, fits = f"an integer from 0 to {MOST_TOKENS}", _is_integer(value, 0, MOST_TOKENS)
        elif name in _COUNTS:
            expected, fits = "an integer of at least 0", _is_integer(value, None if name == "seed" else 0)
        elif name == "exact_heads":
            heads = entry.get("key_heads", MOST_HEADS)
            heads = heads if _is_integer(heads, 1) else MOST_HEADS
            expected = f"a list of different key heads from 0 to {heads - 1}"
            fits = isinstance(value, list | tuple) and all(_is_integer(head, 0, heads - 1) for head in value)
            fits = fits and len(set(value)) == len(value)
        elif name == "weights_of":
            _check_fields(f"{where}.weights_of", value, ("num_features", "layer"))
            continue
        elif name in _SWITCHES:
            expected, fits = "true or false", isinstance(value, bool)
        else:
            known = (*_NAMES, *_SIZES, *_SPANS, *_COUNTS, *_SWITCHES, "exact_heads", "weights_of")
            hint = registry.did_you_mean(name, known)
            raise ValueError(f"{where} has an unknown field, {name}; the fields are {', '.join(known)}.{hint}")
        if not fits:
            raise ValueError(f"{where}.{name} must be {expected}, got {value!r}.")


def _is_integer(value: Any, least: int | None, most: int | None = None) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return (least is None or value >= least) and (most is None or value <= most)
