"""What transformers passes besides queries, keys and values: masks, causality, and arguments to refuse.

Of a mask, linear attention can use only which keys are padding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from favor.integrations._private import is_packed_mask
from favor.integrations.engines import check_dispatch
from favor.kernels.dispatch import is_tracing

# Arguments that change the result: with a value, each is refused rather than dropped.
_REFUSED = {
    "position_bias": "a position bias for each pair of tokens (T5, relative positions)",
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by indices",
    "head_mask": "a head mask",
    "cache": "a paged cache",
}


def favor_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask function of the FAVOR backends, called by transformers once a forward pass.

    Returns:
        None if no key is padding, else a boolean `[B, 1, q_length, kv_length]` view that holds B x kv_length numbers
        (stride 0 over the queries; causality is left to the attention function). Sliding-window layers, which stay
        exact, get transformers' own full mask. Packed sequences get an empty mask of width 0: they are read from
        their lengths, and refused by the attention function where it gets none.

    Raises:
        ValueError: for prefix or block masks and static caches.
    """
    if "deepspeed" in sys.modules and not is_tracing():
        check_dispatch()
    if local_size is not None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **kwargs,
        )
    if mask_function is causal_mask_function:
        if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
            raise ValueError(
                "favor attention needs a cache that grows with the sequence (DynamicCache); a static cache was given. "
                'Use the default cache_implementation, or attn_implementation="sdpa".'
            )
    elif mask_function is not bidirectional_mask_function:
        # A tracer cannot look into it, and transformers there gives every decoder without a mask a packed one.
        if is_tracing() or is_packed_mask(mask_function):
            return torch.empty(batch_size, 1, q_length, 0, dtype=torch.bool, device=kwargs.get("device"))
        raise ValueError(
            "favor attention supports causal and bidirectional masks with padding; this mask adds a prefix or blocks, "
            'which would be ignored. Use attn_implementation="sdpa".'
        )
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if padding.shape[1] < kv_length:
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    if not is_tracing() and bool(padding.all()):
        return None
    return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)


def key_padding(mask: Tensor | None, batch: int, length: int, key_length: int, is_causal: bool) -> Tensor | None:
    """Reads the padding from an attention mask: boolean `[B, S]`, True for real keys; None without a mask.

    Masks from `favor_mask` are read in O(B S). Masks made elsewhere are accepted if they are padding, with or without
    the causal triangle of a causal layer, and say so in every entry.

    Args:
        mask: None, `[B, S]` or `[B, 1, L, S]`; boolean (True for visible) or additive (0 and -inf or very negative).
        batch, length, key_length: B, L, S.
        is_causal: whether the layer is causal.

    Raises:
        ValueError: if the mask holds anything else, such as an additive bias for each pair.
    """
    if mask is None:
        return None
    if mask.ndim == 4 and mask.shape[-1] == 0 < key_length:
        raise ValueError(_UNKNOWN_LENGTHS)
    if mask.ndim == 2:
        mask = mask[:, None, None, :]
    if mask.ndim != 4 or mask.shape[-1] < key_length:
        raise ValueError(f"attention_mask must be [batch, keys] or [batch, 1, queries, keys], got {tuple(mask.shape)}.")
    mask = mask[..., :key_length]
    if mask.shape[1] > 1 and mask.stride(1) != 0:
        raise ValueError(_PAIRWISE.format(shape=tuple(mask.shape)))
    mask = mask[:, 0]
    same_rows = mask.shape[1] == 1 or mask.stride(1) == 0
    if same_rows:
        mask = mask[:, :1]
    visible = _visible(mask)
    if same_rows:
        return visible[:, 0].expand(batch, -1)
    if is_tracing():
        raise ValueError(
            f"cannot read a materialised mask of shape {tuple(mask.shape)} while compiling or recording a CUDA graph; "
            "pass a 2D one."
        )
    padding = visible.any(dim=1, keepdim=True)
    expected = padding
    if is_causal:
        triangle = torch.ones(length, key_length, dtype=torch.bool, device=mask.device)
        expected = padding & triangle.tril(key_length - length)
    # Some models also mask the rows of padded queries; nobody reads those.
    if not bool(((visible == expected) | ~visible.any(-1, keepdim=True)).all()):
        raise ValueError(_PAIRWISE.format(shape=tuple(mask.shape)))
    return padding[:, 0].expand(batch, -1)


def exact_mask(padding: Tensor | None, length: int, key_length: int, is_causal: bool, like: Tensor) -> Tensor | None:
    """Makes the boolean mask `[B, 1, L, S]` of exact attention, or None where its `is_causal` argument is enough.

    Args:
        padding: boolean `[B, S]`, True for real keys; None without padding.
        length, key_length: L and S; the queries are those of the last tokens.
        is_causal: whether queries see earlier keys only.
        like: a tensor on the device of the mask.
    """
    if not is_causal or length == 1:
        return None if padding is None else padding[:, None, None, :].expand(-1, 1, length, -1)
    if padding is None and length == key_length:
        return None
    triangle = torch.ones(length, key_length, dtype=torch.bool, device=like.device).tril(key_length - length)
    return triangle[None, None] if padding is None else triangle & padding[:, None, None, :]


def refuse(kwargs: dict[str, Any], module: nn.Module) -> None:
    """Refuses arguments of an attention function that would have to be dropped.

    Args:
        kwargs: what the model passes besides the arguments the backends know.
        module: the attention module.

    Raises:
        ValueError: naming the argument and what to use instead.
    """
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f'favor attention does not support {what} (argument {name}). Use attn_implementation="sdpa" or '
                f'"eager" for {type(module).__name__}.'
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            'favor attention never forms the attention matrix; use attn_implementation="eager" for output_attentions.'
        )
    if kwargs.get("sliding_window") is not None:
        # Local layers between global ones stay exact, as the model meant them: they are linear in length already.
        layer_types = getattr(module.config, "layer_types", None) or ()
        if "full_attention" not in layer_types:
            raise ValueError(
                f"{type(module).__name__} has sliding-window attention only, which is already linear in length; favor "
                "attention replaces global attention. Set config.sliding_window=None for global attention, or keep "
                'attn_implementation="sdpa".'
            )


def causal_of(module: nn.Module, is_causal: bool | None) -> bool:
    """Tells whether a layer is causal: by the argument if given, else by the module.

    Args:
        module: the attention module.
        is_causal: argument of the attention function.

    Raises:
        ValueError: if neither the argument nor the module says so.
    """
    if is_causal is not None:
        return is_causal
    own = getattr(module, "is_causal", None)
    if own is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal; set its attribute is_causal to True or False."
        )
    return bool(own) and getattr(module.config, "is_causal", None) is not False


def _visible(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    hidden = mask <= -1e4
    if not is_tracing() and not bool(((mask == 0) | hidden).all()):
        raise ValueError(_PAIRWISE.format(shape=tuple(mask.shape)))
    return ~hidden


_UNKNOWN_LENGTHS = (
    "favor attention got packed sequences (position_ids that start again) without their lengths. Pass cu_seq_lens_q, "
    "cu_seq_lens_k, max_length_q and max_length_k, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) does, "
    "or unpack the batch and pass attention_mask. A compiled decoder needs one or the other in any case."
)
_PAIRWISE = (
    "favor attention cannot apply a mask or an additive bias for each pair of tokens (got one of shape {shape}): it "
    "would need the L x L matrix that linear attention avoids. This happens with relative position biases, prefix and "
    'block masks. Use attn_implementation="sdpa" or "eager" for this model.'
)
