"""Arguments that transformers passes besides queries, keys and values: masks, causality, and those to refuse.

Of a mask, linear attention can use only which keys are padding. The names of mask functions are private to
transformers, and checked on 5.17 to 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor import registry
from favor.attention.functional import SEQUENCE_GROUPS
from favor.attention.parallel import WHOLE
from favor.kernels.dispatch import check_not_scripted, is_tracing

# Arguments that change the result: if one has a value, it is refused rather than dropped.
REFUSED = {
    "position_bias": "a position bias for each pair",
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by indices",
    "head_mask": "a head mask",
    "cache": "a paged cache",
}


class Visibility(NamedTuple):
    """Which keys each query of a call sees.

    Attributes:
        causal: whether a query sees earlier keys only.
        reach: how many tokens away a visible key may be, as in layers with a sliding window; None for any distance.
        padding: boolean `[B, S]`, True for real keys; None if all are.
        dense: whether the layer is local in another way, which only its mask of all pairs says.
        counts: real keys of each row, read when the mask was made; empty if they were not read.
    """

    causal: bool
    reach: int | None = None
    padding: Tensor | None = None
    dense: bool = False
    counts: Sequence[int] = ()


def favor_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Makes the mask of the FAVOR backends; transformers calls this once per forward pass.

    Returns:
        A boolean view of B x kv_length numbers, `[B, 1, q_length, kv_length]` if the mask is causal and
        `[B, 1, 1, kv_length]` if not, which shows the padding only. The attribute `favor_visibility` of the mask, a
        `Visibility`, holds the rest, and the attention function reads it. Packed sequences get an empty mask of width
        0: the attention function reads their lengths, and refuses a call without lengths. Local layers with
        chunks or blocks, and those that a compiler records, get transformers' own mask of all pairs.

    Raises:
        ValueError: for prefix or block masks and static caches, and inside torch.jit.trace.
    """
    check_not_scripted()
    if "deepspeed" in sys.modules and not is_tracing():
        _check_not_replaced()
    device = kwargs.get("device")
    pattern = _pattern(mask_function)
    is_static = isinstance(kv_offset, Tensor)  # a FavorCache with max_cache_len, which asks about the new keys
    grows = is_static or (not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length)
    if local_size is not None and (pattern is None or not grows):
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        kwargs.update(q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function)
        mask: Any = sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, **kwargs)
        return record(mask, Visibility(causal=False, dense=True))
    nothing = torch.empty(batch_size, 1, q_length, 0, dtype=torch.bool, device=device)
    if pattern is None and is_tracing():  # when transformers gives each decoder without a mask a packed one
        return nothing
    if pattern is None:
        raise ValueError(
            "favor attention supports causal and bidirectional masks with padding; this mask adds a prefix or blocks, "
            'which would be ignored. Use attn_implementation="sdpa".'
        )
    if pattern.packed:
        return record(nothing, Visibility(pattern.causal, pattern.reach))
    if pattern.causal and not grows:
        raise ValueError(
            "favor attention needs a cache that grows with the sequence (DynamicCache), or a FavorCache with "
            "max_cache_len; a static cache of transformers was given. Use the default cache_implementation, or "
            'attn_implementation="sdpa".'
        )
    padding: Tensor | None = None
    counts: list[int] = []
    if attention_mask is not None:
        if is_static:
            columns = kv_offset + torch.arange(kv_length, device=attention_mask.device)
            padding = attention_mask.index_select(1, columns).to(torch.bool)
        else:
            padding = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        if padding.shape[1] < kv_length:
            padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
        if not is_tracing(padding) and not (is_static and kv_length == 1):  # a GPU waits here, once per forward pass
            counts = padding.sum(1).tolist()
            # Other processes may have padding in their pieces of the sequences, and all exchange their masks.
            is_full = min(counts, default=kv_length) == kv_length and not SEQUENCE_GROUPS
            padding = None if is_full else padding
    shown = torch.ones(1, 1, dtype=torch.bool, device=device) if padding is None else padding
    rows = q_length if pattern.causal and not is_static else 1
    shown = shown[:, None, None, :].expand(batch_size, 1, rows, kv_length)
    if is_static:
        shown = shown.contiguous()  # `generate` would lose the record
    return record(shown, Visibility(pattern.causal, pattern.reach, padding, counts=counts))


def _check_not_replaced() -> None:
    """Raises a ValueError if DeepSpeed has put its attention in the place of every backend's, under the same names."""
    functions = map(ALL_ATTENTION_FUNCTIONS.get, registry.BACKENDS)
    if any(str(getattr(own, "__module__", "")).startswith("deepspeed.") for own in functions):
        raise ValueError(
            "DeepSpeed has replaced the attention functions of transformers, for sequence parallelism (sp_size > 1), "
            "and runs exact attention in place of favor. Set sp_size=1 and take "
            'favor.sequence_parallel(mesh, heads=True), or choose attn_implementation="sdpa".'
        )


class _Pattern(NamedTuple):
    """Which keys a mask function shows, padding left out; `packed`: each query those of its own sequence only."""

    causal: bool
    reach: int | None = None
    packed: bool = False


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


def _pattern(mask_function: Callable[..., Any]) -> _Pattern | None:
    """Tells what a mask function does; None for unknown patterns, such as a prefix, and where a tracer cannot look.

    transformers combines masks as nested functions, and the parts are found in their closures.
    """
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return _Pattern(mask_function is causal_mask_function)
    if is_tracing():
        return None
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
    found = _PATTERNS.get(frozenset(names - _JOINTS))
    if found is None or len(windows) > 1:
        return None
    causal, beyond = found
    return _Pattern(
        causal, None if beyond is None else windows.pop() + beyond, "packed_sequence_mask_function" in names
    )


def record(mask: Tensor, visibility: Visibility) -> Tensor:
    """Gives a mask that tells the attention function what is visible."""
    mask.favor_visibility = visibility  # type: ignore[attr-defined]
    if SEQUENCE_GROUPS and visibility.padding is not None and not is_tracing():
        vars(visibility.padding).setdefault(WHOLE, {})
    return mask


def visibility(
    module: nn.Module,
    mask: Tensor | None,
    is_causal: bool | None,
    shape: tuple[int, int, int],
    sliding_window: int | None = None,
    packed: bool = False,
) -> Visibility:
    """Tells which keys the queries of a layer see; raises a ValueError for what cannot be told or is not supported.

    A mask from `favor_mask` says all. Another mask that has one row per query says whether the layer is causal, and a
    mask that has a single row for all queries says that it is not. Without a mask, or with a mask that has lost its
    record on the way (cut, or moved to another device), the argument `is_causal` decides or, if it is None, the module.

    Args:
        mask: what transformers passed: None, `[B, S]` or `[B, 1, L or 1, S]`; boolean (True for visible) or additive.
        is_causal, sliding_window: arguments of the attention function; visible keys are nearer than the window.
        shape: B, L, S.
        packed: whether the lengths of packed sequences were passed.
    """
    recorded = getattr(mask, "favor_visibility", None)
    reach = None if sliding_window is None else sliding_window - 1
    if packed:
        if mask is not None and mask.numel() and (recorded is None or recorded.padding is not None):
            raise ValueError("a packed batch (cu_seq_lens_q) has no padding; do not pass attention_mask.")
        return recorded or Visibility(causal_of(module, is_causal), reach)
    if mask is not None and mask.ndim == 4 and mask.shape[-1] == 0 < shape[2]:
        raise ValueError(_UNKNOWN_LENGTHS)
    if recorded is not None:
        _check_prefix(module, recorded, shape)
        return recorded
    rows_are_equal = mask is None or mask.ndim == 2 or (mask.ndim == 4 and 0 in (mask.shape[2] - 1, mask.stride(2)))
    if mask is None or shape[1] == 1 or rows_are_equal or is_tracing(mask):
        one_row = mask is not None and mask.ndim == 4 and mask.shape[2] == 1 < shape[1]
        causal = False if one_row else causal_of(module, is_causal)
        return Visibility(causal, reach, None if mask is None else _key_padding(mask, shape[0], shape[2]))
    if reach is not None:
        return Visibility(causal=False, dense=True)
    claimed = getattr(module, "is_causal", False) if is_causal is None else is_causal
    return _of_all_pairs(mask, shape, bool(claimed))


def _check_prefix(module: nn.Module, sees: Visibility, shape: tuple[int, int, int]) -> None:
    """Raises a ValueError if a model is meant to see its prompt both ways, and its mask is causal.

    "sdpa" leaves such a mask out where nothing is padded, and then sees both ways; "eager" applies it.
    """
    both_ways = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
    if both_ways and sees.causal and not getattr(module, "is_causal", True) and shape[1] == shape[2] > 1:
        raise ValueError(
            f"favor attention got a causal mask for {type(module).__name__}, whose config says "
            'use_bidirectional_attention: transformers\' own attentions disagree here. Use attn_implementation="sdpa" '
            'for this part of the model, and favor for others: favor.configure(model, "landmark", only="vision_tower").'
        )


def _key_padding(mask: Tensor, batch: int, key_length: int) -> Tensor:
    """Reads the padding `[B, S]`, True for real keys, from a mask `[B, S]` or `[B, 1, L, S]` whose rows are all equal.

    Raises a ValueError for another shape, other values than 0 and very negative ones, and rows that differ.
    """
    mask = _one_head(mask, key_length)
    if mask.shape[1] > 1 and mask.stride(1) != 0:
        raise ValueError("cannot read a materialised mask while compiling or recording a CUDA graph; pass a 2D one.")
    return _visible(mask[:, :1])[:, 0].expand(batch, -1)


def _of_all_pairs(mask: Tensor, shape: tuple[int, int, int], claimed: bool) -> Visibility:
    """Reads a mask `[B, 1, L, S]` that is padding with or without a causal triangle; tries the module's claim first."""
    batch, length, key_length = shape
    visible = _visible(_one_head(mask, key_length))
    padding = visible.any(dim=1, keepdim=True)
    triangle = torch.ones(length, key_length, dtype=torch.bool, device=mask.device).tril(key_length - length)
    masked_rows = ~visible.any(-1, keepdim=True)  # some models also mask the rows of padded queries, which are not read
    for causal in (claimed, not claimed):
        expected = padding & triangle if causal else padding
        if bool(((visible == expected) | masked_rows).all()):
            return Visibility(causal, None, padding[:, 0].expand(batch, -1))
    raise ValueError(_PAIRWISE.format(shape=tuple(mask.shape)))


def _one_head(mask: Tensor, key_length: int) -> Tensor:
    """Gives a mask as `[B, L or 1, S]`."""
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    if mask.ndim != 4 or mask.shape[-1] < key_length:
        raise ValueError(f"attention_mask must be [batch, keys] or [batch, 1, queries, keys], got {tuple(mask.shape)}.")
    mask = mask[..., :key_length]
    if mask.shape[1] > 1 and mask.stride(1) != 0:
        raise ValueError(_PAIRWISE.format(shape=tuple(mask.shape)))
    return mask[:, 0]


def refuse(kwargs: dict[str, Any], module: nn.Module) -> None:
    """Raises a ValueError for arguments of an attention function that would have to be dropped."""
    check_not_scripted()
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f'favor attention does not support {what} (argument {name}); take "sdpa" or "eager".')
    if kwargs.get("output_attentions"):
        raise ValueError('favor attention never forms the attention matrix; use attn_implementation="eager".')


def causal_of(module: nn.Module, is_causal: bool | None) -> bool:
    """Tells whether a layer is causal: by the argument if given, else by the module; raises a ValueError if neither."""
    if is_causal is not None:
        return is_causal
    own = getattr(module, "is_causal", None)
    if own is None:
        raise ValueError(f"{type(module).__name__} does not say whether it is causal; set its attribute is_causal.")
    # Some encoders are built of layers that claim to be causal, and say elsewhere that they are not decoders.
    claims = (getattr(module.config, "is_causal", None), getattr(module, "is_decoder", None))
    return bool(own) and False not in claims


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    hidden = mask <= -1e4
    if not is_tracing(mask) and not bool(((mask == 0) | hidden).all()):
        raise ValueError(_PAIRWISE.format(shape=tuple(mask.shape)))
    return ~hidden


_UNKNOWN_LENGTHS = (
    "favor attention got packed sequences (position_ids that start again) without their lengths. Pass cu_seq_lens_q, "
    "cu_seq_lens_k, max_length_q and max_length_k, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) does, "
    "or unpack the batch and pass attention_mask. A compiled decoder always needs one or the other."
)
_PAIRWISE = (
    "favor attention cannot apply a mask or an additive bias for each pair of tokens (got one of shape {shape}): it "
    "would need the L x L matrix that linear attention avoids. This happens with relative position biases, prefix and "
    'block masks. Use attn_implementation="sdpa" or "eager" for this model.'
)
