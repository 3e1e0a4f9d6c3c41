"""Text of audio that comes piece by piece, with a chosen look-ahead, by windows of a model that sees both sides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from favor.models.speech.audio import check_open, one_waveform
from favor.models.speech.pronunciations import Pronunciations, lexicon_of
from favor.models.speech.spans import Emission, Span
from favor.models.speech.tokenizer import SPACE, ConformerProcessor
from favor.models.speech.transcription import Transcript
from favor.models.speech.word_beam import Scorer, begin_search

if TYPE_CHECKING:
    from favor.models.whisper_ctc.modeling_whisper_ctc import WhisperForCTC


class WhisperCTCStream:
    """Transcribes one recording piece by piece, with a model that was trained on whole utterances.

    After each `step` seconds the model hears a window: `context` seconds that it has transcribed before, the step, and
    `look_ahead` seconds more. Text of the step is then final. So text comes look_ahead to look_ahead + step seconds
    after its sound, and each second of audio is encoded (context + step + look_ahead) / step times.

    Args:
        model: in evaluation mode.
        processor: features and tokens of the model.
        step: seconds. Default 1.
        look_ahead: seconds. Default 1.
        context: seconds. Default 10.
        scorer: a `WordScorer` or a `WordLexicon` with a language model. Default None: greedy search.
        lexicon: pronunciations of words, if the tokens are phonemes: a file or `Pronunciations`. Default None:
            `lexicon.txt` in the folder of the model, if there is one.

    Raises:
        ValueError: for a model in training mode, times that are negative or no whole number of frames of 20 ms, or a
            window longer than the positions of the model.

    Example:
        >>> import torch
        >>> from favor.models.speech import ConformerProcessor, train_tokenizer
        >>> from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
        >>> from favor.models.whisper_ctc import WhisperCTCStream
        >>> sizes = dict(d_model=64, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=128)
        >>> processor = ConformerProcessor(WhisperCTCFeatureExtractor(), train_tokenizer(["YES"], "char"))
        >>> stream = WhisperCTCStream(WhisperForCTC(WhisperCTCConfig(**sizes)).eval(), processor)
        >>> stream.feed(torch.zeros(40000)), stream.seconds
        (None, 1.0)
    """

    def __init__(
        self,
        model: WhisperForCTC,
        processor: ConformerProcessor,
        step: float = 1.0,
        look_ahead: float = 1.0,
        context: float = 10.0,
        scorer: Scorer | None = None,
        lexicon: str | Path | Pronunciations | None = None,
    ) -> None:
        if model.training:
            raise ValueError("a stream needs a model in evaluation mode: call model.eval().")
        self.model, self.processor, self.scorer = model, processor, scorer
        self.lexicon = lexicon_of(lexicon, model.name_or_path)
        if self.lexicon is not None:
            self.lexicon.check(processor.tokenizer)
        self.samples_per_frame = model.config.samples_per_frame
        rate: int = processor.feature_extractor.sampling_rate
        self._frame = self.samples_per_frame / rate
        frames = [seconds / self._frame for seconds in (step, look_ahead, context)]
        if step <= 0 or min(frames) < 0 or any(abs(count - round(count)) > 1e-6 for count in frames):
            raise ValueError(
                f"step must be above 0, look_ahead and context at least 0, all in frames of {self._frame:g} s; got "
                f"{step:g}, {look_ahead:g} and {context:g}."
            )
        self.step, self.look_ahead, self.context = (round(count) for count in frames)
        if sum(map(round, frames)) > model.config.max_source_positions:
            raise ValueError(
                f"context, step and look_ahead must last at most {model.config.max_source_positions * self._frame:g} s "
                f"together, got {step + look_ahead + context:g} s."
            )
        self.reset()

    def reset(self) -> None:
        """Forgets all audio and text: the next piece begins a new recording."""
        self._samples = torch.zeros(0)
        self._first = 0  # frame at which the samples begin
        config = self.model.config
        self._search = begin_search(config.vocab_size, self.scorer, blank=config.pad_token_id)
        self._frames, self._has_ended = 0, False
        self._texts: list[str] = []  # of the tokens that are read
        self._words: list[Span] = []
        self._read = 0

    @property
    def seconds(self) -> float:
        """Time up to which the text is final."""
        return self._frames * self._frame

    @property
    def emissions(self) -> list[Emission]:
        """Tokens so far, with frames of 20 ms and confidences."""
        return [*self._search.final, *self._search.open]

    @property
    def text(self) -> str:
        """Text so far."""
        last = self._transcript(self._unread())
        return " ".join([*self._texts, last.text])

    @property
    def words(self) -> list[Span]:
        """Words so far, with times in seconds and confidences; the last one may go on."""
        last = self._transcript(self._unread())
        return [*self._words, *last.spans]

    def _unread(self) -> list[Emission]:
        """Gives the tokens that may change or go on; reads those before them, up to the beginning of a word."""
        new = self._search.final[self._read :]
        pieces = self.processor.tokenizer.convert_ids_to_tokens([one.token for one in new])
        letters = [place for place, piece in enumerate(pieces) if piece.strip(SPACE)]
        inner = range(letters[0] + 1, letters[-1] + 1) if letters else range(0)
        begin = max((place for place in inner if pieces[place].startswith(SPACE)), default=0)
        if begin:
            part = self._transcript(new[:begin])
            self._texts.append(part.text)
            self._words += part.spans
            self._read += begin
        return [*new[begin:], *self._search.open]

    def _transcript(self, emissions: list[Emission]) -> Transcript:
        return Transcript.of(emissions, self.processor, self._frame, self.lexicon, "word")

    def feed(self, audio: Any) -> None:
        """Takes the next samples of the recording: floats in [-1, 1], `[n]` at the rate of the model.

        Raises:
            TypeError: for integers.
            ValueError: for samples of several channels or not finite, or after `finish`.
        """
        check_open(self._has_ended)
        self._samples = torch.cat([self._samples, one_waveform(audio)])
        before = self._first
        while self._heard() >= self._frames + self.step + self.look_ahead:
            self._hear(self._frames + self.step, self._frames + self.step + self.look_ahead)
        if self._first > before:
            self._samples = self._samples.clone()  # a view would keep all of the audio

    def finish(self) -> None:
        """Transcribes what is left, when the recording has ended; no more audio is taken until `reset`.

        Raises:
            ValueError: if the recording has ended before.
        """
        check_open(self._has_ended)
        extractor: Any = self.processor.feature_extractor
        features = extractor.num_frames(len(self._samples))
        end = self._first + int(self.model.subsampled_lengths(features))
        while self._frames < end:
            self._hear(min(self._frames + self.step, end), min(self._frames + self.step + self.look_ahead, end))
        self._samples, self._has_ended = torch.zeros(0), True

    def _heard(self) -> int:
        """Counts the frames whose samples are all there."""
        return self._first + len(self._samples) // self.samples_per_frame

    @torch.no_grad()
    def _hear(self, end: int, last: int) -> None:
        """Encodes a window up to frame `last` and searches its logits up to frame `end`."""
        model = self.model
        piece = self._samples[: (last - self._first) * self.samples_per_frame]
        inputs = self.processor(piece, sampling_rate=self.processor.feature_extractor.sampling_rate)
        logits = model(inputs["input_features"].to(model.device, model.dtype)).logits[0]
        self._search.add(logits[self._frames - self._first : end - self._first].float().cpu())
        self._frames = end
        drop = max(0, end - self.context - self._first)
        self._samples = self._samples[drop * self.samples_per_frame :]
        self._first += drop
