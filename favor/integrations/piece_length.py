"""Models inside `favor.sequence_parallel`: how long their pieces may be, and which ones need more than a piece."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import nn

from favor import registry
from favor.integrations.layer import attention_modules, layer_options, stored_choice
from favor.landmark.causal import BLOCK


def piece_multiple(model: nn.Module, size: int) -> int:
    """Gives the number of which the tokens of a piece are a multiple, where `size` processes share sequences.

    Windows end where pieces do, and so do blocks of landmarks, unless the processes exchange heads.
    """
    sizes = [1]
    for module in attention_modules(model).values():
        config = getattr(module, "config", None)
        name, options = (None, {}) if config is None else layer_options(module, config._attn_implementation)
        if name is None:
            continue
        heads: Any = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
        if registry.family_of(name, options.get("features")).selects_keys:
            sizes.append(BLOCK if heads % size else 1)
        else:
            sizes.append(stored_choice(module).get("window", options.get("window")) or 1)
    return math.lcm(*sizes)


def warn_of_convolutions(module: nn.Module) -> None:
    """Warns if the configuration of an attention module names convolutions, and its model does not exchange frames."""
    if torch.compiler.is_compiling():
        return
    named = vars(getattr(module, "config", None) or module)
    sizes = [name for name, size in named.items() if "conv" in name and isinstance(size, int) and size > 1]
    if sizes and not getattr(module, "favor_takes_pieces", False):
        warnings.warn(
            f"the model of {type(module).__name__} has convolutions ({', '.join(sizes)}). Inside sequence_parallel "
            "they do not see the tokens of other processes, and results are wrong near the ends of pieces.",
            stacklevel=2,
        )
