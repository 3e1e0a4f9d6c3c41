"""Private parts of torch and transformers that the integrations reach, each behind one function.

Checked on torch 2.11 to 2.13 and transformers 5.17 to 5.23. With another version, run tests/integrations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor import registry

_MARK = "wrapped_by_favor"  # other libraries wrap the same methods


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


def wrap_once(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Puts a function around a method of a class that is not ours. Only the first call in a process has an effect.

    Args:
        owner: the class.
        name: of the method, which may be a class method.
        around: called with the method as it was, with the model or class, and with the arguments.
    """
    bound = getattr(owner, name)
    if hasattr(bound, _MARK):
        return
    is_class_method = isinstance(bound, MethodType)
    original: Callable[..., Any] = bound.__func__ if is_class_method else bound

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(owner, name, classmethod(method) if is_class_method else method)


def after_construction(function: Callable[[PreTrainedModel], None]) -> None:
    """Makes every transformers model call a function at the end of its construction; see `wrap_once`."""

    def post_init(original: Callable[..., Any], self: PreTrainedModel) -> None:
        original(self)
        function(self)

    wrap_once(PreTrainedModel, "post_init", post_init)


def at_choice_of_backend(function: Callable[[PreTrainedModel, str | None, bool], str | None]) -> None:
    """Lets a function see, and change, the name of each attention backend that a model is about to take.

    Args:
        function: called with the model, which has no layers yet if it is being built, the name that was asked for, None
            if none was, and whether the model is being built. Gives the name to take.
    """

    def check(
        original: Any, self: Any, attn_implementation: str | None, is_init_check: bool = False, *args: Any, **kw: Any
    ) -> Any:
        return original(self, function(self, attn_implementation, is_init_check), is_init_check, *args, **kw)

    wrap_once(PreTrainedModel, "_check_and_adjust_attn_implementation", check)


def around_saving(function: Callable[[PreTrainedModel], AbstractContextManager[None]]) -> None:
    """Runs every `save_pretrained` of a model inside a context."""

    def save_pretrained(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with function(self):
            return original(self, *args, **kwargs)

    wrap_once(PreTrainedModel, "save_pretrained", save_pretrained)


def after_switch(function: Callable[[PreTrainedModel, Any], None]) -> None:
    """Calls a function after each `set_attn_implementation`, with the model and what was set."""

    def set_attn_implementation(original: Any, self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, attn_implementation, *args, **kwargs)
        function(self, attn_implementation)
        return result

    wrap_once(PreTrainedModel, "set_attn_implementation", set_attn_implementation)


def at_missing_weights(function: Callable[[PreTrainedModel, Collection[str]], None]) -> None:
    """Shows a function the names of weights that `from_pretrained` did not find, before it initialises them."""

    def move(original: Any, self: Any, missing_keys: Collection[str], *args: Any, **kwargs: Any) -> Any:
        function(self, missing_keys)
        return original(self, missing_keys, *args, **kwargs)

    wrap_once(PreTrainedModel, "_move_missing_keys_from_meta_to_device", move)


class MaskPattern(NamedTuple):
    """Which keys a mask function of transformers shows to each query, padding left out.

    Attributes:
        causal: whether a query sees earlier keys only.
        reach: how many tokens away a visible key may be; None for any distance.
        packed: whether each query sees the keys of its own packed sequence only.
    """

    causal: bool
    reach: int | None = None
    packed: bool = False


def mask_pattern(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """Tells what a mask function of transformers does; None for unknown patterns, such as a prefix or blocks.

    transformers combines masks as nested functions, and the parts are found in their closures.
    """
    parts, names, windows = [mask_function], set(), set()
    while parts:
        part = parts.pop()
        if not hasattr(part, "__code__"):
            return None
        names.add(part.__qualname__.split(".")[0])
        for variable, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            inner = cell.cell_contents
            if variable == "sliding_window":
                windows.add(inner)
            parts += [f for f in (inner if isinstance(inner, tuple) else (inner,)) if callable(f)]
    packed = "packed_sequence_mask_function" in names
    found = _PATTERNS.get(frozenset(names - _JOINTS))
    if found is None or len(windows) > 1:
        return None
    causal, beyond = found
    reach = None if beyond is None else windows.pop() + beyond
    return MaskPattern(causal, reach, packed)


# Parts that only join others, or cut a batch into its packed sequences.
_JOINTS = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence", "and_masks", "or_masks"}
_BOTH_WAYS = "bidirectional_mask_function"
# Whether a mask is causal, and how far a query sees beyond `sliding_window` tokens; None for all keys.
_PATTERNS: dict[frozenset[str], tuple[bool, int | None]] = {
    frozenset({"causal_mask_function"}): (True, None),
    frozenset({_BOTH_WAYS}): (False, None),
    frozenset({"causal_mask_function", "sliding_window_overlay"}): (True, -1),
    frozenset({_BOTH_WAYS, "sliding_window_bidirectional_overlay"}): (False, 0),
    # Gemma 3 as an encoder: a causal mask or a function that shows everything; a causal mask or its mirror image.
    frozenset({"causal_mask_function", "Gemma3TextModel"}): (False, None),
    frozenset({"causal_mask_function", "sliding_window_overlay", "_bidirectional_window_overlay"}): (False, -1),
}
