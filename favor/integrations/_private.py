"""Private parts of torch and transformers that the integrations reach, each behind one function.

Checked on torch 2.11 to 2.13 and transformers 5.17 to 5.23. With another version, run tests/integrations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor import registry


def in_backward() -> bool:
    """Tells whether this thread is inside a backward pass, which is where activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def always(condition: bool | torch.SymBool) -> bool:
    """Tells whether a condition holds for all sizes that a tracer allows, without binding it to those at hand."""
    return statically_known_true(condition)


def replaced_by() -> str | None:
    """Names the library, if known, that has put its own function in the place of all attention functions.

    DeepSpeed does so (`UlyssesSPAttentionHF.register_with_transformers`) without a change of the names, so that no
    backend is called.
    """
    for name in registry.BACKENDS:
        own = ALL_ATTENTION_FUNCTIONS.get(name)
        if str(getattr(own, "__module__", "")).startswith("deepspeed."):
            return "DeepSpeed"
    return None


def version(tensor: Tensor) -> int:
    """Counts the writes in place to a tensor. Tensors made in inference mode have no such count, and torch raises."""
    return tensor._version


def after_construction(function: Callable[[PreTrainedModel], None]) -> None:
    """Has a function called with every transformers model at the end of its construction.

    Only the first call in a process has an effect.
    """
    if hasattr(PreTrainedModel.post_init, "__wrapped__"):
        return
    original: Callable[[Any], None] = PreTrainedModel.post_init

    @wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        function(self)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def is_packed_mask(mask_function: Callable[..., Any]) -> bool:
    """Tells whether a mask function of transformers is causal or bidirectional within packed sequences, and no more.

    transformers combines masks as nested functions, and the parts are found in their closures.
    """
    parts, kinds = [mask_function], set()
    while parts:
        part = parts.pop()
        kinds.add(part.__qualname__.split(".")[0])
        for cell in part.__closure__ or ():
            inner = cell.cell_contents
            parts += [f for f in (inner if isinstance(inner, tuple) else (inner,)) if callable(f)]
    return "packed_sequence_mask_function" in kinds and kinds <= _PARTS_OF_PACKED


_PARTS_OF_PACKED = {
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "and_masks",
    "causal_mask_function",
    "bidirectional_mask_function",
}
