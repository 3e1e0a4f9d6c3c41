"""`model.transcribe`: from audio files or waveforms to text with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import can_return_tuple

from favor.integrations.modules import evaluating
from favor.models.speech.audio import file_seconds, read_file
from favor.models.speech.ctc import check_beam
from favor.models.speech.encoder import EncoderOutput, ctc_loss, frame_counts
from favor.models.speech.ngram import NgramModel
from favor.models.speech.pronunciations import Pronunciations, lexicon_of
from favor.models.speech.spans import Emission, Span, in_seconds, join_segments, join_words
from favor.models.speech.tokenizer import ConformerProcessor
from favor.models.speech.word_beam import Scorer, check_searches_words, search_emissions, searched_words
from favor.models.speech.word_scorer import WordScorer

Audio = str | Path | np.ndarray | Tensor
TIMES = (None, "char", "word", "segment")


@dataclass(frozen=True)
class Transcript:
    """What is said in one recording.

    Attributes:
        text: all of it.
        spans: characters (or word pieces), words or segments with start and end in seconds and a confidence, as
            `return_timestamps` asked for; empty without it.
    """

    text: str
    spans: list[Span]

    @classmethod
    def of(
        cls,
        emissions: list[Emission],
        processor: ConformerProcessor,
        seconds: float,
        lexicon: Pronunciations | None = None,
        return_timestamps: str | None = None,
        pause: float = 0.5,
    ) -> Transcript:
        """Makes a transcript of the tokens of one recording, whose frames last `seconds`; options of `transcribe`."""
        text = " ".join(one.word for one in emissions if one.word)  # if a search among pronunciations has found words
        if not text:
            text = str(processor.tokenizer.decode([one.token for one in emissions], group_tokens=False))
            text = text if lexicon is None else lexicon.read(text)
        if return_timestamps is None:
            return cls(text, [])
        spans = in_seconds(processor.tokenizer.spans(emissions), seconds)
        if return_timestamps == "char":
            return cls(text, spans)
        words = join_words(spans)
        if lexicon is not None:
            words = [replace(word, text=own) for word, own in zip(words, text.split(), strict=True)]
        return cls(text, join_segments(words, pause) if return_timestamps == "segment" else words)


class Transcribes:
    """The method `transcribe` of the models that recognise speech."""

    @torch.no_grad()
    def transcribe(
        self: Any,
        audio: Audio | Sequence[Audio],
        batch_size: int = 8,
        return_timestamps: str | None = None,
        processor: ConformerProcessor | None = None,
        pause: float = 0.5,
        *,
        beam_size: int | None = None,
        language_model: str | Path | NgramModel | None = None,
        lm_weight: float | None = None,
        word_score: float | None = None,
        hotwords: Sequence[str] = (),
        hotword_weight: float | None = None,
        known_words: bool = False,
        lexicon: str | Path | Pronunciations | None = None,
    ) -> list[Transcript]:
        """Text of recordings, by greedy search, or by beam search with a language model and hotwords.

        Files of any format that libsndfile knows (FLAC, MP3, WAV, OGG) are read without ffmpeg and converted to the
        sampling rate of the model. Recordings of about the same length are a batch, and each is one pass, however long.

        Args:
            audio: one recording or several: paths, or mono waveforms `[n]` of floats in [-1, 1] at the sampling rate of
                the model.
            batch_size: recordings that go through the model together. Default 8.
            return_timestamps: "char", "word" or "segment" for spans with times and confidences. Default None: text
                alone. With word pieces "char" gives the pieces, and with a lexicon the phonemes.
            processor: features and tokens of the model. Default None: the one in the folder of the model.
            pause: a longer pause in seconds begins a new segment. Default 0.5.
            beam_size: hypotheses of `ctc_word_beam`, which needs a CTC model and the extra `lm`. Default None: 50 with
                a language model or hotwords, 200 with `known_words`, and 1, greedy search, without.
            language_model: n-gram model of words: an ARPA file, a binary file of KenLM, or an `NgramModel`, to load it
                once for many calls. Default None: without.
            lm_weight: weight of its log probability, often called alpha. Default 0.5.
            word_score: added for each word, often called beta, with a language model. Default 1.5.
            hotwords: words or phrases to find more easily, written as the transcripts of the model. Default: none.
            hotword_weight: added for each hotword in the text, in nats. Default 10. `WordScorer` has the formula.
            known_words: whether only words of the language model can be found, by `ctc_lexicon_beam`: fewer errors if
                the model spells badly and few words are unknown. Needs a tokenizer of characters, and takes no
                hotwords. Default False: any word.
            lexicon: pronunciations of words, for a model whose tokens are phonemes: a file with lines WORD<TAB>PH PH,
                or `Pronunciations`, to load it once for many calls. With a language model the search is that of
                `known_words`. Without one each word is looked up by its phonemes, which stay where they are those of no
                word. Default None: `lexicon.txt` in the folder of the model, if there is one.

        Returns:
            One result a recording, in the order given. Times are those of the frames in which the model says the
            tokens: a token can end before its sound does, and a Transducer says it somewhat later. A word is as sure as
            its least sure token, and a segment as its words on average. Confidences are those of the speech model,
            without the language model.

        Raises:
            ImportError: for a beam search without the package flashlight-text.
            ValueError: for options out of range or without effect, such as a language model for a Transducer, without a
                processor, or for audio that cannot be read, is too short or is no mono waveform; the message names it.
            TypeError: for a waveform that holds no floats, or a single string as hotwords.
        """
        if return_timestamps not in TIMES:
            raise ValueError(f"return_timestamps must be char, word, segment or None, got {return_timestamps!r}.")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        join_segments([], pause)  # checks it before the work begins
        processor = processor or processor_of(self.name_or_path)
        if beam_size is not None:
            check_beam(beam_size)
        lexicon = lexicon_of(lexicon, self.name_or_path)
        words = {"language_model": language_model, "lm_weight": lm_weight, "word_score": word_score}
        words |= {"hotwords": hotwords, "hotword_weight": hotword_weight}
        scorer = searched_words(self, processor.tokenizer, beam_size, known_words, lexicon, **words)
        if scorer is None and beam_size not in (None, 1):
            check_searches_words(self, "beam_size")
            scorer = WordScorer(processor.tokenizer)
        search = {} if scorer is None else {"scorer": scorer, "beam_size": beam_size}
        rate = processor.feature_extractor.sampling_rate
        recordings = _listed(audio)
        # Lengths in a batch are alike, as padding costs time. The longest is first: memory runs out at once or never.
        lengths = [file_seconds(one) if isinstance(one, str | Path) else len(one) / rate for one in recordings]
        order = sorted(range(len(recordings)), key=lambda index: -lengths[index])
        found: dict[int, Transcript] = {}
        with evaluating(self):
            for first in range(0, len(order), batch_size):
                chosen = order[first : first + batch_size]
                waveforms = [_waveform(recordings[index], f"waveform {index}", self, processor) for index in chosen]
                inputs = processor(waveforms, sampling_rate=rate).to(self.device, self.dtype)
                rows = self.emissions(**inputs, **search)
                seconds = self.config.samples_per_frame / rate
                for index, row in zip(chosen, rows, strict=True):
                    found[index] = Transcript.of(row, processor, seconds, lexicon, return_timestamps, pause)
        return [found[index] for index in range(len(recordings))]


class TranscribesCTC(Transcribes):
    """A model with an `encoder` and CTC: `frame_logits` gives logits `[B, L, V]` and the real frames `[B]`."""

    @can_return_tuple
    def forward(
        self: Any,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Computes logits of every frame, and the CTC loss if there are labels.

        Args:
            input_features: `[B, T, num_mel_bins]`.
            attention_mask: `[B, T]`, 1 for real frames, which come first. Default: all real.
            labels: `[B, U]`, padded with -100. The blank is `config.pad_token_id`.
            **kwargs: for the encoder, such as `chunks` of a Conformer, and for its attention backend.

        Returns:
            `logits` `[B, L, vocab_size]`, L as the encoder has it; `loss` by `config.ctc_loss_reduction`.
        """
        encoded = self.encoder(input_features, attention_mask, **kwargs)
        logits = self.logits_of(encoded)
        loss = None if labels is None else ctc_loss(logits, frame_counts(encoded), labels, self.config)
        return CausalLMOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )

    def logits_of(self: Any, encoded: EncoderOutput) -> Tensor:
        """Gives logits `[B, L, vocab_size]` of the encoder's output."""
        return self.ctc_head(encoded.last_hidden_state)

    def frame_logits(self: Any, input_features: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gives logits `[B, L, vocab_size]`, and how many frames of each row are real, `[B]`."""
        encoded = self.encoder(input_features, attention_mask)
        return self.logits_of(encoded), frame_counts(encoded)

    @torch.no_grad()
    def emissions(
        self: Any,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        scorer: Scorer | None = None,
        beam_size: int | None = None,
    ) -> list[list[Emission]]:
        """Gives the tokens of each row, with frames and confidences, as `search_emissions` finds them."""
        found = self.frame_logits(input_features, attention_mask)
        return search_emissions(*found, scorer, beam_size, self.config.pad_token_id)


def processor_of(folder: str) -> ConformerProcessor:
    """The processor that was saved with a model."""
    if not folder:
        raise ValueError(
            "processor must be given: this model was not loaded from a folder. Pass "
            "processor=ConformerProcessor(feature_extractor, tokenizer)."
        )
    try:
        return ConformerProcessor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"processor must be given: {folder}, where the model was loaded from, holds none that can be loaded. Pass "
            f"processor=, or save it there with processor.save_pretrained. Loading said: {' '.join(str(error).split())}"
        ) from error


def _listed(audio: Audio | Sequence[Audio]) -> list[Audio]:
    if isinstance(audio, str | Path) or (isinstance(audio, np.ndarray | Tensor) and audio.ndim == 1):
        return [audio]
    recordings = list(audio)
    for index, one in enumerate(recordings):
        if not isinstance(one, str | Path) and np.ndim(one) != 1:
            raise ValueError(
                f"audio must be paths or mono waveforms [n], got {type(one).__name__} of shape {list(np.shape(one))} "
                f"at place {index}. Average the channels first."
            )
    return recordings


def _waveform(one: Audio, place: str, model: Any, processor: ConformerProcessor) -> Any:
    """Samples of a recording; raises ValueError if they give no frame."""
    extractor: Any = processor.feature_extractor
    samples: Any = one
    if isinstance(one, str | Path):
        place, samples = str(one), read_file(one, extractor.sampling_rate, resample=True)
    if not torch.as_tensor(samples).isfinite().all():
        raise ValueError(f"{place}: holds samples that are not finite.")
    if model.subsampled_lengths(extractor.num_frames(len(samples))) < 1:
        raise ValueError(f"{place}: {len(samples)} samples are too few for one frame of the model: leave it out.")
    return samples
