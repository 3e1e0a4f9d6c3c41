"""What the backends cannot do, and say so."""

from __future__ import annotations

from typing import Any

from torch import nn

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


def refuse(kwargs: dict[str, Any], module: nn.Module) -> None:
    """Raises a ValueError for arguments of an attention function that would have to be dropped.

    Args:
        kwargs: what the model passes besides the arguments the backends know.
        module: the attention module.
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
    """Whether a layer is causal: the argument if given, else what the module says.

    Raises:
        ValueError: if neither says.
    """
    if is_causal is not None:
        return is_causal
    own = getattr(module, "is_causal", None)
    if own is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is causal; set its attribute is_causal to True or False."
        )
    return bool(own) and getattr(module.config, "is_causal", None) is not False
