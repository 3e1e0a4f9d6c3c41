"""Engines that do not run a model in one Python process: what attention must know about them, or refuse.

Some engines never call favor, so this module cannot notice them: vLLM, like other servers, loads a model of
transformers with its own attention, whatever `config.favor` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from favor.features import Parameters
from favor.integrations._private import always, replaced_by


def heads_of_process(
    module: nn.Module, number: int, parameters: Parameters | None, exact: Sequence[int]
) -> tuple[Parameters | None, Sequence[int], tuple[int, int] | None]:
    """Picks what belongs to the key heads that this process has, under tensor parallelism.

    Args:
        module: the attention module, with its config.
        number: how many key heads are at hand.
        parameters: of all key heads of the layer, or None.
        exact: numbers of the key heads of the layer that stay exact.

    Returns:
        The parameters and the exact heads among the key heads at hand and, if processes share the heads, which of the
        heads with directions these are: argument `key_heads` of `favor.favor_attention`.

    Raises:
        ValueError: if the heads are shared out unevenly.
    """
    share = share_of(module, number)
    if share is None:
        return parameters, exact, None
    return share.parameters(parameters), share.exact_heads(exact), share.drawn(exact)


class Share(NamedTuple):
    """The key heads of a layer that this process has.

    Attributes:
        first: number of its first key head.
        number: how many it has.
        total: how many the layer has.
    """

    first: int
    number: int
    total: int

    def parameters(self, stored: Parameters | None) -> Parameters | None:
        """Gives its part of the parameters of all key heads."""
        return None if stored is None else stored.heads(range(self.first, self.first + self.number))

    def exact_heads(self, exact: Sequence[int]) -> list[int]:
        """Gives its key heads that stay exact, counted from its own first one."""
        return [head - self.first for head in exact if 0 <= head - self.first < self.number]

    def drawn(self, exact: Sequence[int]) -> tuple[int, int]:
        """Gives the number of its first key head with directions, and how many such heads the layer has."""
        return self.first - sum(head < self.first for head in exact), self.total - len(exact)


def share_of(module: nn.Module, key_heads: int) -> Share | None:
    """Tells which heads of an attention module this process has; None if it has all, or nothing is shared out.

    Args:
        module: the attention module, with its config.
        key_heads: of the keys at hand.

    Raises:
        ValueError: if the heads are shared out unevenly.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and missing in some builds of torch

    config = module.config
    total = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    for parameter in module.parameters() if total != key_heads else ():
        if not isinstance(parameter, DTensor):
            continue
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard():
                processes, rank = parameter.device_mesh.size(dimension), parameter.device_mesh.get_local_rank(dimension)
                if total != processes * key_heads:
                    raise ValueError(
                        f"{type(module).__name__} has {key_heads} of {total} key heads in one of {processes} processes "
                        "of tensor parallelism, and favor attention needs equally many in each. Take a number of "
                        'processes that divides the key heads, or attn_implementation="sdpa".'
                    )
                return Share(rank * key_heads, key_heads, total)
    return None


def check_dispatch() -> None:
    """Raises a ValueError if another library has put its own attention in the place of every backend's."""
    library = replaced_by()
    if library is not None:
        raise ValueError(
            f"{library} has replaced the attention functions of transformers, for sequence parallelism (sp_size > 1), "
            'and runs exact attention in place of favor. Set sp_size=1, or choose attn_implementation="sdpa".'
        )


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
            "only one of them. Set exact_below=0, as in favor.configure(model, exact_below=0), or export a range of "
            "lengths on one side of it."
        )
