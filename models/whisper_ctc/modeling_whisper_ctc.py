"""CTC on the encoder of a Whisper, for audio of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCTC, WhisperForConditionalGeneration, WhisperModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask
from transformers.models.whisper.modeling_whisper import WhisperEncoder, WhisperPreTrainedModel, sinusoids
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

from favor.models.speech.encoder import Count, EncoderOutput, PaddedBatchNorm, check_features, right_padded
from favor.models.speech.tokenizer import ConformerProcessor
from favor.models.speech.transcription import TranscribesCTC
from favor.models.whisper_ctc.configuration_whisper_ctc import WhisperCTCConfig
from favor.models.whisper_ctc.streaming_whisper_ctc import WhisperCTCStream

_logger = logging.get_logger(__name__)

# Fields of a Whisper's configuration that describe its encoder.
OF_ENCODER = ["activation_dropout", "activation_function", "attention_dropout", "d_model", "dropout", "init_std"]
OF_ENCODER += ["encoder_attention_heads", "encoder_ffn_dim", "encoder_layerdrop", "encoder_layers"]
OF_ENCODER += ["max_source_positions", "num_mel_bins"]


class WhisperCTCEncoder(WhisperEncoder):
    """Whisper's encoder for features of any length, with padding that has no effect.

    For 30 seconds the outputs are those of transformers' `WhisperEncoder`. After `max_source_positions` frames the
    positions begin again, and `config.sliding_window` keeps attention to the frames nearby.
    """

    config: WhisperCTCConfig
    config_class = WhisperCTCConfig

    def __init__(self, config: WhisperCTCConfig) -> None:
        super().__init__(config)
        # transformers does not do this for subclasses outside of it. A model that is loaded is first made without data.
        table, positions = self.embed_positions.weight, sinusoids(*self.embed_positions.weight.shape)
        if not (table.is_meta or positions.is_meta):
            init.copy_(table, positions)

    @capture_outputs
    def forward(  # type: ignore[override]
        self, input_features: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> EncoderOutput:
        """Encodes log-mel features.

        Args:
            input_features: `[B, T, num_mel_bins]`.
            attention_mask: `[B, T]`, 1 for real frames, which come first (padding on the right). Default: all real.
            **kwargs: for the attention backend.

        Returns:
            L = ceil(T / 2) frames, 20 ms apart.

        Raises:
            ValueError: for features or a mask of another shape, or padding on the left.
        """
        hidden_states, real = self.subsample(input_features, attention_mask)
        hidden_states = hidden_states + self.positions(hidden_states)
        hidden_states = functional.dropout(hidden_states, self.dropout, self.training)
        local = self.config.sliding_window is not None
        make_mask = create_bidirectional_sliding_window_mask if local else create_bidirectional_mask
        mask = make_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=real)
        for layer in self.layers:
            if self.training and self.layerdrop > 0 and torch.rand([]) < self.layerdrop:
                continue
            hidden_states = layer(hidden_states, mask, **kwargs)
        return EncoderOutput(last_hidden_state=self.layer_norm(hidden_states), attention_mask=real)

    def subsample(self, input_features: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Turns features `[B, T, num_mel_bins]` into frames `[B, L, C]` and their mask `[B, L]`."""
        check_features(input_features, self.config.num_mel_bins)
        features = input_features.transpose(1, 2)
        if attention_mask is None:
            frames, real = functional.gelu(self.conv1(features)), None
        else:
            given = right_padded(attention_mask, input_features)
            # Beyond the end there is nothing, as without padding.
            frames = functional.gelu(self.conv1(features * given[:, None])) * given[:, None]
            real = given[:, ::2]
        return functional.gelu(self.conv2(frames)).transpose(1, 2), real

    def positions(self, frames: Tensor) -> Tensor:
        """Gives the embeddings of positions `[L, C]` for frames `[B, L, C]`."""
        length, table = frames.shape[1], self.embed_positions.weight
        if length > len(table) and self.config.sliding_window is None:
            _logger.warning_once(
                f"WhisperForCTC got {length} frames and was trained on at most {len(table)}: with attention over more "
                "than that it recognises little. Use transcribe or window_logits, which read windows, or set "
                f"config.sliding_window, for example to {len(table) // 4}."
            )
        return table[torch.arange(length, device=table.device) % len(table)].to(frames.dtype)


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
        return self.out(self.dropout(self.out_norm(frames)))


class WhisperForCTC(TranscribesCTC, WhisperPreTrainedModel):
    """Whisper's encoder with a CTC head (Graves et al. 2006) of convolutions and a linear layer.

    Example:
        >>> import torch
        >>> from favor.models.whisper_ctc import WhisperCTCConfig, WhisperForCTC
        >>> config = WhisperCTCConfig(d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128)
        >>> model = WhisperForCTC(config).eval()
        >>> model(input_features=torch.randn(1, 100, 80)).logits.shape
        torch.Size([1, 50, 32])
    """

    config: WhisperCTCConfig
    config_class = WhisperCTCConfig
    base_model_prefix = "encoder"

    def __init__(self, config: WhisperCTCConfig) -> None:
        super().__init__(config)
        self.encoder = WhisperCTCEncoder(config)
        self.ctc_head = WhisperCTCHead(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear | nn.Conv1d):
            # As torch does: with Whisper's fixed deviation of 0.02 the convolutions of the head learn nothing for long.
            init.kaiming_uniform_(module.weight, a=5**0.5)

    @classmethod
    def from_whisper(cls, model: Any, vocab_size: int, **settings: Any) -> WhisperForCTC:
        """Makes a model with a copy of the encoder of a Whisper, and a new head.

        Args:
            model: `WhisperModel` or `WhisperForConditionalGeneration` of transformers.
            vocab_size: tokens, the blank included.
            **settings: further fields of `WhisperCTCConfig`.

        Raises:
            TypeError: for another model.

        Example:
            >>> from transformers import WhisperConfig, WhisperModel
            >>> from favor.models.whisper_ctc import WhisperForCTC
            >>> sizes = dict(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64)
            >>> whisper = WhisperModel(WhisperConfig(decoder_layers=1, decoder_attention_heads=2, **sizes))
            >>> WhisperForCTC.from_whisper(whisper, vocab_size=30, dropout=0.1).config.d_model
            32
        """
        if not isinstance(model, WhisperModel | WhisperForConditionalGeneration):
            raise TypeError(f"model must be a Whisper of transformers, got {type(model).__name__}.")
        given = {name: getattr(model.config, name) for name in OF_ENCODER}
        made = cls(WhisperCTCConfig(**{**given, **settings, "vocab_size": vocab_size}))
        made.encoder.load_state_dict(model.get_encoder().state_dict())
        return made

    def subsampled_lengths(self, lengths: Count) -> Count:
        """Counts encoder frames, given numbers of feature frames: of an utterance, or `[B]`."""
        return (lengths + 1) // 2

    def logits_of(self, encoded: EncoderOutput) -> Tensor:
        """Gives logits `[B, L, vocab_size]` of the encoder's output."""
        return self.ctc_head(encoded.last_hidden_state, encoded.attention_mask)

    @torch.no_grad()
    def window_logits(self, input_features: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes logits of long recordings window by window, so that time and memory grow with the length alone.

        A window is half as long as the positions of the model, 15 seconds for a Whisper; the 10 seconds in its middle
        are kept. A recording that is not longer than the positions is one pass.

        Args:
            input_features: `[B, T, num_mel_bins]`, of the whole recordings.
            attention_mask: `[B, T]`, 1 for real frames, which come first. Default: all real.

        Returns:
            Logits `[B, L, vocab_size]` with L = ceil(T / 2), and the real frames of each row, `[B]`.
        """
        most = self.config.max_source_positions
        keep, beside = max(1, most // 3), most // 12
        if attention_mask is None:
            attention_mask = input_features.new_ones(input_features.shape[:2])
        mask = right_padded(attention_mask, input_features)
        lengths = self.subsampled_lengths(mask.sum(1))
        if input_features.shape[1] <= 2 * most:
            return self(input_features, mask).logits, lengths
        rows = []
        for features, length in zip(input_features, mask.sum(1).tolist(), strict=True):
            parts, total = [], self.subsampled_lengths(length)
            step = keep if length > 2 * most else max(1, total)
            for first in range(0, total, step):
                start, stop = max(0, first - beside), min(length, 2 * (first + step + beside))
                logits = self(features[None, 2 * start : stop]).logits[0]
                parts.append(logits[first - start : first - start + step])
            rows.append(torch.cat(parts))
        return pad_sequence(rows, True), lengths

    frame_logits = window_logits

    def stream(self, processor: ConformerProcessor, **settings: Any) -> WhisperCTCStream:
        """Starts a recording that comes in pieces; see `favor.models.whisper_ctc.WhisperCTCStream`."""
        return WhisperCTCStream(self, processor, **settings)


AutoConfig.register(WhisperCTCConfig.model_type, WhisperCTCConfig, exist_ok=True)
AutoModelForCTC.register(WhisperCTCConfig, WhisperForCTC, exist_ok=True)
