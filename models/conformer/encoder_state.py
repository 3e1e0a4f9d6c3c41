"""State of an encoder between pieces of audio, and the step from one piece to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from favor.kernels import StreamState
from favor.models.conformer.chunks import Chunks, check_chunks
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor

if TYPE_CHECKING:
    from favor.models.conformer.modeling_conformer import ConformerModel


@dataclass
class KeyValues:
    """State of exact attention: keys and values so far, `[B, H, S, head_dim]` each; none before the first frame."""

    tensors: tuple[Tensor, ...] = ()

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Adds the next keys and values and returns all of them."""
        pairs = zip(self.tensors, new, strict=True) if self.tensors else ((one,) for one in new)
        self.tensors = tuple(torch.cat(pair, dim=2) for pair in pairs)
        return self.tensors

    def forget(self, kept: int) -> None:
        """Drops all but the last `kept` keys and values."""
        self.tensors = tuple(old[:, :, max(0, old.shape[2] - kept) :].clone() for old in self.tensors)


AttentionState = StreamState | KeyValues


@dataclass
class BlockState:
    """State of a layer: last inputs of its convolution `[B, C, kernel - 1]`; attention of the batch or of each row."""

    convolution: Tensor
    attention: AttentionState | list[AttentionState]

    @classmethod
    def joined(cls, states: Sequence[BlockState]) -> BlockState:
        """Makes the state of a batch of recordings, whose lengths may differ, of that of each one."""
        attention: Any = [state.attention for state in states]
        begun = [own for own in attention if not isinstance(own, StreamState) or own.memory is not None]
        if begun and all(isinstance(own, StreamState) and own.can_join for own in begun):
            attention = StreamState.joined(attention)
        return cls(torch.cat([state.convolution for state in states]), attention)

    def split(self) -> list[BlockState]:
        """Gives the state of each recording of a batch that `joined` has made."""
        attention: Any = self.attention
        rows = attention if isinstance(attention, list) else attention.split()
        return [BlockState(inputs.clone(), own) for inputs, own in zip(self.convolution.split(1), rows, strict=True)]


@dataclass
class EncoderState:
    """All that the audio so far leaves behind in front of and in the encoder."""

    layers: list[BlockState]
    samples: Tensor | None = None  # that the next window of features begins with, [n]
    features: Tensor | None = None  # that no frame has used up, [B, T, num_mel_bins]
    position: int = 0  # of the next frame; the rotary embedding counts from there
    chunks: Chunks | None = None  # in which frames are computed; None for a causal encoder
    has_ended: bool = False  # no more audio comes, so that the last chunk may be shorter

    @classmethod
    def empty(cls, encoder: ConformerModel, batch_size: int = 1, chunks: Chunks | None = None) -> EncoderState:
        """Makes the state before the first sample."""
        layers: Any = encoder.layers
        return cls([layer.empty_state(batch_size) for layer in layers], chunks=chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return bytes_of(vars(self).values())

    def hear(self, new: Tensor, extractor: ConformerFeatureExtractor, encoder: ConformerModel) -> None:
        """Adds the next samples `[n]` of one recording."""
        samples = new if self.samples is None else torch.cat((self.samples, new))
        count = extractor.num_frames(len(samples))
        self.samples = samples[count * extractor.hop_length :].clone()
        if count:
            self.add(extractor.scale(extractor.log_mel(samples, encoder.device)).unsqueeze(0), encoder)

    def add(self, features: Tensor, encoder: ConformerModel) -> None:
        """Adds the next features `[B, T, num_mel_bins]`."""
        features = features.to(encoder.device, encoder.dtype)
        self.features = features.clone() if self.features is None else torch.cat((self.features, features), dim=1)

    def ready(self, encoder: ConformerModel, most: int | None = None) -> int:
        """Counts the frames that can be computed now: whole chunks, if there are chunks and the audio has not ended."""
        there = 0 if self.features is None else encoder.subsampled_lengths(self.features.shape[1])
        size = 1 if self.chunks is None else self.chunks.size
        count = there if most is None else min(there, max(most, size))
        return count if self.has_ended and count == there else count - count % size

    def advance(self, frames: int, encoder: ConformerModel) -> None:
        """Goes on after so many frames: drops the features that no later frame needs."""
        if self.features is not None:
            self.features = self.features[:, frames * encoder.config.subsampling_conv_stride**2 :].clone()
        self.position += frames

    def restart(self, encoder: ConformerModel) -> None:
        """Forgets what earlier frames left in the layers; samples and features that wait stay."""
        self.layers, self.position = EncoderState.empty(encoder).layers, 0


def bytes_of(part: Any) -> int:
    """Counts the bytes of all tensors in a state or in parts of one."""
    if isinstance(part, Tensor | StreamState):
        return part.nbytes
    parts = vars(part).values() if isinstance(part, KeyValues | BlockState) else part
    return sum(map(bytes_of, parts)) if isinstance(parts, Iterable) else 0


def check_stream(model: Any, feature_extractor: ConformerFeatureExtractor | None, chunks: Chunks | None) -> None:
    """Raises ValueError for a model or an extractor that needs the whole recording."""
    if chunks is not None:
        check_chunks(getattr(model, "encoder", model), chunks)
    elif not getattr(model.config, "causal", False):
        raise ValueError(
            "a stream needs a causal model: train one with ConformerConfig(causal=True). A model that was trained with "
            "chunks (favor.train.asr --dynamic_chunk) streams with chunks=Chunks(size)."
        )
    if model.training:
        raise ValueError("a stream needs a model in evaluation mode: call model.eval().")
    if feature_extractor is not None and feature_extractor.normalize == "utterance":
        raise ValueError(
            'normalize="utterance" needs the whole recording: stream with a feature extractor (and a model trained '
            'with one) of normalize="none".'
        )


@torch.no_grad()
def encode(encoder: ConformerModel, states: Sequence[EncoderState], counts: Sequence[int]) -> list[Tensor]:
    """Computes the next frames of several recordings in one pass, `[B, count, C]` for each state.

    All layers run on the whole batch. Only attention can differ: the states of positive features without a window are
    joined. With other states (exact attention, windows, landmarks) attention runs for each recording alone, because
    each recording is at another place of its blocks. So does the first piece, if none of the states has any frames yet.
    """
    width, stride = encoder.config.subsampling_conv_kernel_size, encoder.config.subsampling_conv_stride
    used = [(count - 1) * stride**2 + (width - 1) * (1 + stride) + 1 for count in counts]
    pieces: list[Any] = [state.features for state in states]
    device, several, real = pieces[0].device, len(states) > 1, None
    if several:
        features = pad_sequence([piece[0, :length] for piece, length in zip(pieces, used, strict=True)], True)
    else:
        features = pieces[0][:, : used[0]]
    hidden = encoder.subsample(features)
    if len(set(counts)) > 1:
        real = torch.arange(hidden.shape[1], device=device) < torch.tensor(counts, device=device)[:, None]
    first = torch.tensor([state.position for state in states], device=device)
    embeddings = encoder.rotary_emb(hidden, first[:, None] + torch.arange(hidden.shape[1], device=device))
    own = [state.layers for state in states]
    layers = [BlockState.joined(parts) for parts in zip(*own, strict=True)] if several else own[0]
    for layer, state in zip(encoder.layers, layers, strict=True):
        hidden = layer(hidden, position_embeddings=embeddings, real=real, state=state, chunks=states[0].chunks)
    hidden = encoder.out_norm(hidden)
    if not several:
        return [hidden]
    rows = zip(*(layer.split() for layer in layers), strict=True)
    for own_state, row in zip(states, rows, strict=True):
        own_state.layers = list(row)
    return [hidden[row : row + 1, :count] for row, count in enumerate(counts)]
