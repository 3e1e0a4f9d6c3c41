"""The simplest call that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any


def simplify(call: Any, fails: Callable[[Any], bool]) -> Any:
    """Puts defaults and smaller numbers into a dataclass for as long as it fails."""
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(call):
            if fails(simpler):
                call, changed = simpler, True
                break
    return call


def _simpler(call: Any) -> Iterator[Any]:
    for field in fields(call):
        value, default = getattr(call, field.name), field.default
        if default is MISSING or value == default:
            continue
        yield replace(call, **{field.name: default})
        if isinstance(value, tuple):
            for index in range(len(value)):
                rest = value[:index] + value[index + 1 :]
                if rest:
                    yield replace(call, **{field.name: rest})
        elif type(value) is int:
            yield from (replace(call, **{field.name: less}) for less in (value // 2, value - 1) if less > default)
        elif isinstance(value, float) and isinstance(default, float) and value > default:
            yield replace(call, **{field.name: max(value / 2, default)})
    if hasattr(call, "keys") and call.length == call.keys:  # of self-attention
        yield from (replace(call, length=less, keys=less) for less in (call.length // 2, call.length - 1) if less > 0)
