"""Decoding one token at a time: the state of causal attention, its size independent of the length so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from favor.kernels.dispatch import kernel_module, pick
from favor.kernels.operands import Operands

# The arguments of an operator have to be flat; their order is that of saved graphs, and cannot change.
_DECODE = (
    "(Tensor query, Tensor key, Tensor value, Tensor query_directions, Tensor key_directions, Tensor offset, "
    "Tensor key_bias, Tensor(a7!) log_weight, Tensor(a8!) summary, str kernel) -> Tensor"
)


@dataclass
class DecodeState:
    """State that past keys leave behind: for each feature their total weight and the weighted mean of their values.

    Attributes:
        log_weight: logarithm of the sum of exp(key.uk_m + key_bias), `[B, Hk, M]`; -inf before the first key.
        summary: `[B, Hk, M, dv]`. Both are float32 (float64 for float64 models).

    Example:
        >>> import torch
        >>> from favor.kernels import DecodeState
        >>> DecodeState(torch.full((1, 2, 8), -torch.inf), torch.zeros(1, 2, 8, 4)).summary.shape
        torch.Size([1, 2, 8, 4])
    """

    log_weight: Tensor
    summary: Tensor

    @classmethod
    def empty(
        cls,
        batch_size: int,
        key_heads: int,
        num_features: int,
        value_width: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DecodeState:
        """Makes the state before the first token."""
        shape = (batch_size, key_heads, num_features)
        log_weight = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        return cls(log_weight, torch.zeros(*shape, value_width, dtype=dtype, device=device))

    @classmethod
    @torch.no_grad()
    def from_keys(
        cls, key: Tensor, value: Tensor, key_directions: Tensor, key_bias: Tensor, *, kernel: str = "auto"
    ) -> DecodeState:
        """Makes the state after a prompt, from which decoding goes on.

        Args:
            key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
            key_directions: `[n, Hk, M, d]`, n = 1 or B; key_bias: `[B, Hk, S]`.
            kernel: "auto", "torch" or "triton".
        """
        module = kernel_module(pick(kernel, key, value), "summary")
        key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (key, value))
        directions, bias = key_directions.contiguous(), key_bias.contiguous()
        with torch.cuda.device_of(key):
            summary, log_weight, *_ = module.summarise(directions, key, bias, value, None, key.shape[2])
        return cls(log_weight, summary)


@torch.no_grad()
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    state: DecodeState,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Does one step of causal attention: adds a key to the state, in place, and reads it with a query. No gradient.

    Args:
        query: `[B, H, 1, d]`; key, value: `[B, Hk, 1, d]`, `[B, Hk, 1, dv]`.
        query_directions, key_directions, offset: as in `linear_attention`.
        key_bias: `[B, Hk, 1]`; -inf leaves the state unchanged.
        state: changed in place.
        kernel: "auto", "torch" or "triton".

    Returns:
        `[B, H, 1, dv]`, what `linear_attention` with `is_causal` gives for the last token.

    Raises:
        ValueError: if there is more than one token, or the kernel cannot run.

    Example:
        >>> import torch
        >>> from favor.kernels import DecodeState, decode
        >>> q, k, v = torch.randn(3, 1, 2, 1, 4)
        >>> uq, uk, offset = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4), torch.zeros(1, 2, 8)
        >>> state = DecodeState(torch.full((1, 2, 8), -torch.inf), torch.zeros(1, 2, 8, 4))
        >>> out = decode(q, k, v, uq, uk, offset, torch.zeros(1, 2, 1), state)
        >>> torch.allclose(out, v)  # one key, so its value
        True
    """
    if query.shape[2] != 1 or key.shape[2] != 1:
        raise ValueError(f"decode takes one token at a time, got {query.shape[2]} queries and {key.shape[2]} keys.")
    *operands, _ = Operands(query, key, value, query_directions, key_directions, offset, key_bias).readable()
    out: Tensor = _decode(*operands, state.log_weight, state.summary, kernel)
    return out


def _step(*arguments: Any) -> Tensor:
    query, _, value, *_, kernel = arguments
    module = kernel_module(pick(kernel, query, value), "decode")
    with torch.cuda.device_of(query):
        out: Tensor = module.decode(*arguments[:-1])
    return out


_decode = torch.library.custom_op("favor::decode", _step, mutates_args=("log_weight", "summary"), schema=_DECODE)


@_decode.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])
