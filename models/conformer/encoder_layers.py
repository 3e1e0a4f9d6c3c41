"""Layers of the Conformer encoder: transformers' LASR layers that respect padding, can be causal and can stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lasr.modeling_lasr import (
    LasrEncoderAttention,
    LasrEncoderBlock,
    LasrEncoderConvolutionModule,
    apply_rotary_pos_emb,
)

from favor import registry
from favor.attention.functional import sequence_group
from favor.integrations.layer import layer_options
from favor.kernels import StreamState
from favor.models.conformer.chunks import Chunks
from favor.models.conformer.configuration_conformer import ConformerConfig
from favor.models.conformer.encoder_state import AttentionState, BlockState, KeyValues
from favor.models.conformer.pieces import with_neighbours
from favor.models.speech.encoder import PaddedBatchNorm


class ConformerConvolution(LasrEncoderConvolutionModule):
    """Pointwise, gated, depthwise, normalised: padding is zero before the depthwise convolution."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config)
        width = config.conv_kernel_size
        self.left = width - 1 if config.causal else width // 2
        self.right = width - 1 - self.left
        self.depthwise_conv = nn.Conv1d(
            config.hidden_size, config.hidden_size, width, groups=config.hidden_size, bias=config.convolution_bias
        )
        self.norm = PaddedBatchNorm(config.hidden_size, momentum=config.batch_norm_momentum)

    def forward(
        self,
        hidden_states: Tensor,
        real: Tensor | None = None,
        state: BlockState | None = None,
        chunks: Chunks | None = None,
    ) -> Tensor:
        """Convolves `[B, T, C]` over time; arguments as of `ConformerBlock`."""
        hidden_states = functional.glu(self.pointwise_conv1(hidden_states.transpose(1, 2)), dim=1)
        if real is not None:
            hidden_states = hidden_states.masked_fill(~real.unsqueeze(1), 0.0)
        if state is None and (group := sequence_group()) is not None:
            hidden_states = with_neighbours(hidden_states, self.left, self.right, group)
        elif state is None:
            hidden_states = functional.pad(hidden_states, (self.left, self.right if chunks is None else 0))
        else:
            hidden_states = torch.cat((state.convolution, hidden_states), dim=-1)
            # The inputs that the next piece needs end with the last real frame.
            if real is None:
                state.convolution = hidden_states[..., hidden_states.shape[-1] - self.left :].clone()
            else:
                places = real.sum(1, keepdim=True) + torch.arange(self.left, device=real.device)
                state.convolution = hidden_states.gather(-1, places.unsqueeze(1).expand(-1, hidden_states.shape[1], -1))
        if chunks is None:
            convolved = self.depthwise_conv(hidden_states)
        else:
            convolved = chunks.convolve(hidden_states, self.depthwise_conv, self.right)
        hidden_states = self.activation(self.norm(convolved, real))
        return self.pointwise_conv2(hidden_states).transpose(1, 2)


class ConformerAttention(LasrEncoderAttention):
    """Self-attention with rotary positions; the backend is that of the configuration."""

    favor_takes_pieces = True  # inside `favor.sequence_parallel` the convolutions of the model get frames of neighbours

    def __init__(self, config: ConformerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.is_causal = config.causal

    def empty_state(self) -> AttentionState:
        """Makes the state before the first frame: of constant size for the FAVOR backends, else all keys and values."""
        backend, _ = layer_options(self, self.config._attn_implementation)  # None if only other layers were switched
        return KeyValues() if backend is None else StreamState()

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        real: Tensor | None = None,
        chunks: Chunks | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of whole recordings `[B, T, C]`; arguments as of `ConformerBlock`."""
        if chunks is None or self.config._attn_implementation not in registry.BACKENDS:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        heads, dropout = self._heads(hidden_states, position_embeddings), self.attention_dropout * self.training
        return self.o_proj(self._unrolled(*heads, chunks, real, dropout=dropout, **kwargs).flatten(2)), None

    def stream(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        state: AttentionState | list[AttentionState],
        real: Tensor | None = None,
        chunks: Chunks | None = None,
    ) -> Tensor:
        """Computes attention of the next frames `[B, T, C]` to themselves, or their chunk, and all before them."""
        query, key, value = self._heads(hidden_states, position_embeddings)
        if not isinstance(state, list):
            return self.o_proj(self._attend(query, key, value, state, real, chunks).flatten(2))
        out = hidden_states.new_zeros(*hidden_states.shape[:2], query.shape[1] * self.head_dim)
        lengths = [query.shape[2]] * len(state) if real is None else real.sum(1).tolist()
        for row, (own, length) in enumerate(zip(state, lengths, strict=True)):
            now = (slice(row, row + 1), slice(None), slice(length))
            out[row, :length] = self._attend(query[now], key[now], value[now], own, None, chunks)[0].flatten(1)
        return self.o_proj(out)

    def _heads(self, hidden_states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gives query, key and value `[B, H, T, head_dim]`."""
        heads = (*hidden_states.shape[:2], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (projection(hidden_states).view(heads).transpose(1, 2) for projection in projections)
        return *apply_rotary_pos_emb(query, key, *position_embeddings), value

    def _unrolled(
        self, query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, real: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Computes `[B, T, H, head_dim]` in chunks with a causal FAVOR backend, see `Chunks.unrolled`."""
        order, is_key, places = chunks.unrolled(query.shape[2], query.device)
        shown = is_key.expand(len(query), -1) if real is None else is_key & real[:, order]
        tensors = (tensor[:, :, order] for tensor in (query, key, value))
        attend: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, *tensors, shown, scaling=self.scaling, is_causal=True, **kwargs)[0][:, places]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: AttentionState,
        real: Tensor | None,
        chunks: Chunks | None,
    ) -> Tensor:
        """Computes `[B, T, H, head_dim]`; exact attention takes no padding."""
        if isinstance(state, StreamState) and chunks is not None:
            return self._unrolled(query, key, value, chunks, real, favor_state=state)
        if isinstance(state, StreamState):
            attend: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            return attend(self, query, key, value, real, scaling=self.scaling, favor_state=state)[0]
        key, value = state.append(key, value)
        new, total = query.shape[2], key.shape[2]
        if chunks is None:
            seen = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        else:
            seen = chunks.visible(new, total, query.device)
            if chunks.left is not None:
                state.forget(chunks.left * chunks.size)
        out = functional.scaled_dot_product_attention(
            query, key, value, seen, scale=self.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)


class ConformerBlock(LasrEncoderBlock):
    """Half a feed-forward layer, attention, convolution, half a feed-forward layer, normalisation."""

    self_attn: ConformerAttention
    conv: ConformerConvolution

    def __init__(self, config: ConformerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = ConformerAttention(config, layer_idx)
        self.conv = ConformerConvolution(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Any = None,
        real: Tensor | None = None,
        state: BlockState | None = None,
        chunks: Chunks | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs one layer on frames."""
        hidden_states = self.half_step(hidden_states, self.norm_feed_forward1, self.feed_forward1)
        normed = self.norm_self_att(hidden_states)
        if state is None:
            attended = self.self_attn(normed, position_embeddings, attention_mask, real, chunks, **kwargs)[0]
        else:
            attended = self.self_attn.stream(normed, position_embeddings, state.attention, real, chunks)
        hidden_states = hidden_states + self.dropout(attended)
        kept, new = self.conv_residual_weights
        convolved = self.conv(self.norm_conv(hidden_states), real, state, chunks)
        hidden_states = kept * hidden_states + new * self.dropout(convolved)
        return self.norm_out(self.half_step(hidden_states, self.norm_feed_forward2, self.feed_forward2))

    def empty_state(self, batch_size: int) -> BlockState:
        """Makes the state before the first frame."""
        weight: Tensor = self.conv.depthwise_conv.weight
        return BlockState(weight.new_zeros(batch_size, weight.shape[0], self.conv.left), self.self_attn.empty_state())

    def half_step(self, hidden_states: Tensor, norm: nn.Module, feed_forward: nn.Module) -> Tensor:
        """Runs the residual feed-forward layer."""
        kept, new = self.feed_forward_residual_weights
        return kept * hidden_states + new * self.dropout(feed_forward(norm(hidden_states)))
