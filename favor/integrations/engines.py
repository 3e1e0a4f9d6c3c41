"""Engines that run a model otherwise than Python does: what a call of attention has to know of them, or refuse."""

from __future__ import annotations

from favor.integrations._private import always


def check_exact_below(keys: int, bound: int) -> None:
    """Refuses to freeze a choice between exact and linear attention in an exported program.

    Args:
        keys: how many there are; a symbol, if the program is to take several lengths.
        bound: `exact_below`.

    Raises:
        ValueError: if some of the lengths that the program takes are below the bound and others are not.
    """
    if not (always(keys < bound) or always(keys >= bound)):
        raise ValueError(
            f"exact_below={bound} chooses exact or linear attention by the number of keys, and an exported program has "
            "one of them. Set exact_below=0, as in favor.configure(model, exact_below=0), or export a range of lengths "
            "on one side of it."
        )
