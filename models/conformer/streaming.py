"""Transcription while the speaker speaks: a Conformer, causal or in chunks, that takes audio piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from favor.models.conformer.chunks import Chunks
from favor.models.conformer.encoder_state import EncoderState, check_stream, encode
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech.audio import check_open, one_waveform
from favor.models.speech.tokenizer import ConformerProcessor
from favor.models.speech.transducer import transducer_greedy

if TYPE_CHECKING:
    from favor.models.conformer.modeling_conformer import ConformerForCTC, ConformerModel
    from favor.models.conformer.modeling_transducer import ConformerForTransducer


class ConformerStream:
    """Runs a Conformer piece by piece; its outputs are those of the whole recording with the same chunks.

    Args:
        model: a `ConformerModel`, `ConformerForCTC` or `ConformerForTransducer` in evaluation mode.
        feature_extractor: for `feed`, with fixed normalisation. Without an extractor only `feed_features` works.
        batch_size: recordings that run side by side. Default 1.
        chunks: in which a model runs that is not causal. Default None: the model is causal.

    Attributes:
        frames: encoder frames so far.
        tokens: what greedy search has found so far, a list for each recording.

    Raises:
        ValueError: if the model is in training mode, is not causal and has no chunks or cannot run in them, or if
            features depend on the whole utterance.
        TypeError: for a processor; `model.transcribe_stream` takes it and gives text.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForCTC, ConformerStream
        >>> config = ConformerConfig.preset("tiny", causal=True, attn_implementation="favor+", favor={"exact_below": 0})
        >>> stream = ConformerStream(ConformerForCTC(config).eval())
        >>> stream.feed_features(torch.randn(1, 60, 80)).shape[1], stream.feed_features(torch.randn(1, 40, 80)).shape[1]
        (12, 10)
    """

    def __init__(
        self,
        model: ConformerModel | ConformerForCTC | ConformerForTransducer,
        feature_extractor: ConformerFeatureExtractor | None = None,
        batch_size: int = 1,
        chunks: Chunks | None = None,
    ) -> None:
        if isinstance(feature_extractor, ConformerProcessor):
            raise TypeError("stream takes a feature extractor; for text call model.transcribe_stream(processor).")
        check_stream(model, feature_extractor, chunks)
        self.chunks = chunks
        self.model, self.encoder = model, getattr(model, "encoder", model)
        self.feature_extractor, self.batch_size = feature_extractor, batch_size
        self._is_transducer = hasattr(model, "predict")
        self._head: Any = None if self._is_transducer else getattr(model, "ctc_head", None)
        self.reset()

    def reset(self) -> None:
        """Forgets all audio, tokens and states: the next piece begins a new recording."""
        self.frames = 0
        self.tokens: list[list[int]] = [[] for _ in range(self.batch_size)]
        self._context: list[Tensor] = []
        self._state = EncoderState.empty(self.encoder, self.batch_size, self.chunks)

    @property
    def latency(self) -> float:
        """Seconds of audio from the beginning of a frame, the first of its chunk, until it can be computed.

        Computing time comes on top.
        """
        config = self.encoder.config
        width, stride = config.subsampling_conv_kernel_size, config.subsampling_conv_stride
        hops = (width - 1) * (1 + stride) + (0 if self.chunks is None else (self.chunks.size - 1) * stride**2)
        extractor = self.feature_extractor
        rate, window = (16000, 400) if extractor is None else (extractor.sampling_rate, extractor.win_length)
        return (hops * config.feature_hop_length + window) / rate

    @property
    def state_bytes(self) -> int:
        """Bytes kept between pieces."""
        return self._state.nbytes + sum(part.nbytes for part in self._context)

    def feed(self, audio: Any) -> Tensor:
        """Takes the next samples of one recording: floats in [-1, 1], `[n]` at the extractor's rate.

        Returns:
            What `feed_features` returns for the features that are complete.

        Raises:
            TypeError: for integers.
            ValueError: without an extractor, for samples of several channels or not finite, or after `finish`.
        """
        extractor = self.feature_extractor
        if extractor is None or self.batch_size != 1:
            raise ValueError("feed needs a feature_extractor and batch_size 1; use feed_features for features.")
        check_open(self._state.has_ended)
        self._state.hear(one_waveform(audio), extractor, self.encoder)
        return self._next()

    def feed_features(self, features: Tensor) -> Tensor:
        """Takes the next features `[B, T, num_mel_bins]`, and appends to `tokens` what they add.

        Returns:
            Logits `[B, m, V]` of a CTC model, else encoder frames `[B, m, C]`: those whose features are complete; m may
            be 0.

        Raises:
            ValueError: after `finish`.
        """
        check_open(self._state.has_ended)
        self._state.add(features, self.encoder)
        return self._next()

    def finish(self) -> Tensor:
        """Ends the recording: gives what `feed` gives, for the frames of the last chunk, which may be shorter.

        The tokens stay until `reset`, before which no more audio is taken.

        Raises:
            ValueError: if the recording has ended before.
        """
        check_open(self._state.has_ended)
        self._state.has_ended = True
        return self._next()

    @torch.no_grad()
    def _next(self) -> Tensor:
        """Computes and decodes the frames that are complete."""
        count = self._state.ready(self.encoder)
        if count == 0:
            return self._nothing()
        hidden_states = encode(self.encoder, [self._state], [count])[0]
        self._state.advance(count, self.encoder)
        self.frames += count
        return self._decode(hidden_states)

    def _decode(self, hidden_states: Tensor) -> Tensor:
        """Gives the output of the new frames; what greedy search finds in them goes to `tokens`."""
        if self._is_transducer:
            lengths = [hidden_states.shape[1]] * self.batch_size
            found = transducer_greedy(self.model, hidden_states, lengths, context=self._context)
            for tokens, new in zip(self.tokens, found, strict=True):
                tokens += new
        if self._head is None:
            return hidden_states
        logits = self._head(hidden_states)
        best, blank = logits.argmax(-1), self.model.config.pad_token_id
        # A token that continues from the piece before is not a new one.
        last = self._context[0] if self._context else torch.full_like(best[:, :1], blank)
        starts = (best != blank) & (best != torch.cat((last, best[:, :-1]), dim=1))
        for tokens, row, start in zip(self.tokens, best, starts, strict=True):
            tokens += row[start].tolist()
        self._context = [best[:, -1:].clone()]
        return logits

    def _nothing(self) -> Tensor:
        encoder = self.encoder
        width = encoder.config.hidden_size if self._head is None else self._head.out_features
        return torch.empty(self.batch_size, 0, width, dtype=encoder.dtype, device=encoder.device)
