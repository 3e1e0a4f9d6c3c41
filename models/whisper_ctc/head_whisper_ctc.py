"""The head of CTC on Whisper's encoder: gated convolutions over time, then a linear layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from favor.models.speech.encoder import PaddedBatchNorm
from favor.models.whisper_ctc.configuration_whisper_ctc import WhisperCTCConfig


class HeadConvolution(nn.Module):
    """Residual block: normalised, gated, convolved over time in each channel, mixed."""

    def __init__(self, config: WhisperCTCConfig) -> None:
        super().__init__()
        width, size = config.d_model, config.head_kernel_size
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.convolution = nn.Conv1d(width, width, size, padding=size // 2, groups=width)
        self.mix = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.head_dropout)

    def forward(self, frames: Tensor, real: Tensor | None) -> Tensor:
        """Convolves frames `[B, L, C]`; real `[B, L]`, boolean, is False for padding, which counts as zeros."""
        gated = functional.glu(self.gate(self.norm(frames)), dim=-1)
        if real is not None:
            gated = gated * real.unsqueeze(-1)
        convolved = self.convolution(gated.transpose(1, 2)).transpose(1, 2)
        return frames + self.dropout(self.mix(functional.silu(convolved)))


class WhisperCTCHead(nn.Module):
    """Turns frames of the encoder into logits.

    A few channels of Whisper's output are ten times as large as the others, so each is normalised first. A linear layer
    alone hardly learns from few hours of speech; `head_layers` convolutions let a frame see its neighbours.
    """

    def __init__(self, config: WhisperCTCConfig) -> None:
        super().__init__()
        self.norm = PaddedBatchNorm(config.d_model)
        self.layers = nn.ModuleList(HeadConvolution(config) for _ in range(config.head_layers))
        self.out_norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.head_dropout)
        self.out = nn.Linear(config.d_model, config.vocab_size)

    def forward(self, frames: Tensor, real: Tensor | None = None) -> Tensor:
        """Gives logits `[B, L, vocab_size]` of frames `[B, L, C]`; real `[B, L]`, boolean, is False for padding."""
        frames = self.norm(frames.transpose(1, 2), real).transpose(1, 2)
        for layer in self.layers:
            frames = layer(frames, real)
        logits: Tensor = self.out(self.dropout(self.out_norm(frames)))
        return logits
