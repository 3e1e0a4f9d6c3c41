"""Decoding one token at a time: the state of causal attention, its size independent of the length so far."""

# No `from __future__ import annotations`: the schema of the operator is read from the annotations.
from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.dispatch import pick, readable
from favor.kernels.eager.bidirectional import LN2, Inputs, summarise
from favor.kernels.operands import Geometry, Operands, sequences


@dataclass
class DecodeState:
    """What past keys leave behind: for each feature their total weight and the weighted mean of their values.

    Attributes:
        log_weight: logarithm of the sum of exp(key.uk_m + key_bias), `[B, Hk, M]`; -inf before the first key.
        summary: `[B, Hk, M, dv]`. Both are float32 (float64 for float64 models).
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
    ) -> "DecodeState":
        """The state before the first token."""
        shape = (batch_size, key_heads, num_features)
        log_weight = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        return cls(log_weight, torch.zeros(*shape, value_width, dtype=dtype, device=device))

    @classmethod
    @torch.no_grad()
    def from_keys(
        cls, key: Tensor, value: Tensor, key_directions: Tensor, key_bias: Tensor, *, kernel: str = "auto"
    ) -> "DecodeState":
        """The state after a prompt, for decoding to go on from.

        Args:
            key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
            key_directions: `[n, Hk, M, d]`, n = 1 or B; key_bias: `[B, Hk, S]`.
            kernel: "auto", "torch" or "triton".
        """
        if pick(kernel, key, value) == "triton":
            from favor.kernels.gpu.summary import summarise as summarise_triton

            key, value = readable(key, value)
            with torch.cuda.device_of(key):
                summary, log_weight, _ = summarise_triton(
                    key_directions.contiguous(), key, key_bias.contiguous(), value, None, key.shape[2]
                )
            return cls(log_weight, summary)
        offset = key_directions.new_zeros(key_directions.shape[:3])
        operands = Operands(key[:, :, :0], key, value, key_directions, key_directions, offset, key_bias)
        geometry = Geometry(None, None, 0, key.shape[2])
        top, total, state = summarise(Inputs.of(next(sequences(operands, geometry))), key.shape[2])
        summary = state / total.masked_fill(total == 0, 1.0)
        shape = (*key.shape[:2], -1)
        return cls((LN2 * top + total.log()).reshape(shape), summary.reshape(*shape, value.shape[-1]))


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
    """One step of causal attention: adds a key to the state, in place, and reads it with a query. No gradient.

    Args:
        query: `[B, H, 1, d]`; key, value: `[B, Hk, 1, d]`, `[B, Hk, 1, dv]`.
        query_directions, key_directions, offset: as in `linear_attention`.
        key_bias: `[B, Hk, 1]`; -inf leaves the state as it is.
        state: changed in place.
        kernel: "auto", "torch" or "triton".

    Returns:
        `[B, H, 1, dv]`, what `linear_attention` with `is_causal` gives for the last token.

    Raises:
        ValueError: if there is more than one token, or the kernel cannot run.
    """
    if query.shape[2] != 1 or key.shape[2] != 1:
        raise ValueError(f"decode takes one token at a time, got {query.shape[2]} queries and {key.shape[2]} keys.")
    rows = readable(query, key, value)
    operands = [tensor.contiguous() for tensor in (query_directions, key_directions, offset, key_bias)]
    return _decode(*rows, *operands, state.log_weight, state.summary, kernel)


@torch.library.custom_op("favor::decode", mutates_args=("log_weight", "summary"))
def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    log_weight: Tensor,
    summary: Tensor,
    kernel: str,
) -> Tensor:
    operands = (query, key, value, query_directions, key_directions, offset, key_bias, log_weight, summary)
    if pick(kernel, query, value) == "triton":
        from favor.kernels.gpu.decode import decode as decode_triton

        with torch.cuda.device_of(query):
            return decode_triton(*operands)
    return _decode_torch(*operands)


@_decode.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    log_weight: Tensor,
    summary: Tensor,
    kernel: str,
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _decode_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_directions: Tensor,
    key_directions: Tensor,
    offset: Tensor,
    key_bias: Tensor,
    log_weight: Tensor,
    summary: Tensor,
) -> Tensor:
    key_heads, dtype = key.shape[1], log_weight.dtype
    hidden = (key_bias == -torch.inf).unsqueeze(-1)
    key, value = (tensor.to(dtype).masked_fill(hidden, 0.0) for tensor in (key, value))
    logits = (key_directions @ key.transpose(2, 3)).squeeze(3) + key_bias  # [B, Hk, M]
    risen = torch.logaddexp(log_weight, logits)
    seen = risen != -torch.inf
    share = torch.where(seen, logits - risen, -torch.inf).exp().unsqueeze(3)
    summary += share * (value - summary)
    log_weight.copy_(risen)
    queries = query.to(dtype).unflatten(1, (key_heads, -1)).squeeze(3)  # [B, Hk, G, d]
    rows = queries @ query_directions.transpose(2, 3) + torch.where(seen, risen + offset, 0.0).unsqueeze(2)
    return (rows.softmax(-1) @ summary).flatten(1, 2).unsqueeze(2).to(query.dtype)
