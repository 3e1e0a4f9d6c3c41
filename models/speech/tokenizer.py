"""Tokens for speech: word pieces of sentencepiece, decoding that knows the blank of CTC, and the processor."""

from __future__ import annotations

import io
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, LasrProcessor
from transformers.models.wav2vec2.tokenization_wav2vec2 import Wav2Vec2CTCTokenizerOutput
from transformers.tokenization_utils_base import generate_merges
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from favor._parts import needs
from favor.models.speech.encoder import IGNORED
from favor.models.speech.spans import Emission, Span, join_words

if TYPE_CHECKING:
    import sentencepiece

SPECIAL = ("<pad>", "</s>", "<unk>")
MODEL_TYPES = ("unigram", "bpe", "char")
SPACE = "▁"
SENTENCEPIECE_FILE = "spiece.model"
_APOSTROPHES = str.maketrans(dict.fromkeys("\u2018\u2019\u02bc`", "'"))


def normalize_transcript(text: str) -> str:
    """Writes a transcript as LibriSpeech does: capitals A to Z, apostrophes, single spaces.

    Letters lose their accents ("é" is E, "ß" SS), typographic apostrophes become plain, and everything else, digits and
    hyphens included, becomes a space. Numbers are not spelled out: do that first if they matter.

    Args:
        text: any text.

    Returns:
        The normalised text, empty if nothing is left.

    Example:
        >>> normalize_transcript("Mr. Brontë-Smith’s  dog")
        "MR BRONTE SMITH'S DOG"
    """
    plain = unicodedata.normalize("NFKD", text.translate(_APOSTROPHES).upper())
    letters = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return " ".join(re.sub("[^A-Z']", " ", letters).split())


class ConformerTokenizer(TokenizersBackend):
    """Word pieces of a Unigram, BPE or character model, without special tokens around a text.

    Ids: 0 `<pad>`, also the blank of CTC and Transducer, 1 `</s>` (not used by the models), 2 `<unk>`, then the pieces.
    `decode` takes the frame-wise ids of CTC by default; pass `group_tokens=False` for ids that are collapsed
    already, such as those of a Transducer or of a beam search. `train_tokenizer` and `from_pretrained` make one.

    `output_char_offsets=True` and `output_word_offsets=True` of `decode` and `batch_decode` return text and frames as
    transformers' `Wav2Vec2CTCTokenizer` does: `text`, and `char_offsets` and `word_offsets`, lists of dicts with `char`
    or `word`, `start_offset`, and `end_offset`, the frame after the last one. A `char` is what one token stands for: a
    piece such as " GOO" if the tokens are word pieces. With `group_tokens=False` the unit is tokens and not frames.

    Example:
        >>> from favor.models.speech import train_tokenizer
        >>> tokenizer = train_tokenizer(["good morning", "good evening"], "char")
        >>> tokenizer.decode(tokenizer("good").input_ids, group_tokens=False)
        'good'
    """

    # transformers loads tokenizer.json unchanged only for classes that have no __init__ of their own.
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    replace_word_delimiter_char = " "  # the pipeline asks for it to make words of characters

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        group_tokens: bool = True,
        output_char_offsets: bool = False,
        output_word_offsets: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Turns ids into text and, if asked, offsets; `group_tokens` first makes one of equal neighbours; blanks go."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        lengths = [1] * len(ids)
        if group_tokens:
            runs = [(token, len(list(run))) for token, run in itertools.groupby(ids)]
            ids, lengths = [token for token, _ in runs], [length for _, length in runs]
        text = super()._decode(
            [token for token in ids if token != self.pad_token_id],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            **kwargs,
        )
        if not (output_char_offsets or output_word_offsets):
            return text
        found = [
            Emission(token, end - length, end, 1.0)
            for token, end, length in zip(ids, itertools.accumulate(lengths), lengths, strict=True)
            if token != self.pad_token_id and not (skip_special_tokens and token in self.all_special_ids)
        ]
        pieces = _offsets("char", self.spans(found))
        offsets: dict[str, Any] = {"char_offsets": pieces} if output_char_offsets else {}
        if output_word_offsets:
            offsets["word_offsets"] = self._get_word_offsets(pieces)
        return Wav2Vec2CTCTokenizerOutput(text=text, **offsets)

    def batch_decode(self, sequences: Any, *args: Any, **kwargs: Any) -> Any:
        """Texts of several sequences; with offsets one output whose fields are lists."""
        found = super().batch_decode(sequences, *args, **kwargs)
        if not (kwargs.get("output_char_offsets") or kwargs.get("output_word_offsets")):
            return found
        rows: list[Any] = found if isinstance(found, list) else [found]
        lists: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        return Wav2Vec2CTCTokenizerOutput(**lists)

    def spans(self, emissions: Sequence[Emission]) -> list[Span]:
        """Text and frames of tokens that a search or an alignment found.

        Args:
            emissions: of one utterance, without blanks.

        Returns:
            One span a token. The space that begins a word is in front of its piece, but for the first piece of all;
            `join_words` makes words of them.
        """
        texts = [piece.replace(SPACE, " ") for piece in self.convert_ids_to_tokens([one.token for one in emissions])]
        texts[:1] = [text.removeprefix(" ") for text in texts[:1]]
        return [
            Span(text, one.start, one.end, one.confidence) for text, one in zip(texts, emissions, strict=True) if text
        ]

    def _get_word_offsets(self, offsets: list[dict[str, Any]], word_delimiter_char: str = " ") -> list[dict[str, Any]]:
        """Words of `char_offsets`; the pipeline calls it by this name."""
        spans = [Span(one["char"], one["start_offset"], one["end_offset"], 1.0) for one in offsets]
        return _offsets("word", join_words(spans))


def _offsets(name: str, spans: list[Span]) -> list[dict[str, Any]]:
    return [{name: span.text, "start_offset": span.start, "end_offset": span.end} for span in spans]


class ConformerProcessor(LasrProcessor):
    """A `ConformerFeatureExtractor` and a `ConformerTokenizer` behind one call.

    Args:
        feature_extractor: makes `input_features` and `attention_mask` of audio.
        tokenizer: makes `labels` of text, and text of ids: `decode` and `batch_decode` are its methods.

    Example:
        >>> import numpy as np
        >>> from favor.models.conformer import ConformerFeatureExtractor
        >>> from favor.models.speech import ConformerProcessor, train_tokenizer
        >>> tokenizer = train_tokenizer(["good morning", "good evening"], "char")
        >>> processor = ConformerProcessor(ConformerFeatureExtractor(), tokenizer)
        >>> sorted(processor(audio=np.zeros(16000, dtype=np.float32), sampling_rate=16000, text="good"))
        ['attention_mask', 'input_features', 'labels']
    """

    def __call__(  # type: ignore[override]
        self, audio: Any = None, text: str | list[str] | None = None, sampling_rate: int | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Makes model inputs of audio, of transcripts, or of both.

        Args:
            audio: one waveform or several, see `ConformerFeatureExtractor`. Default None.
            text: one transcript or several, taken unchanged; see `normalize_transcript`. Default None.
            sampling_rate: of the audio. Default None: that of the extractor, with a warning.
            **kwargs: for the feature extractor.

        Returns:
            With audio, `input_features [B, T, F]` and `attention_mask [B, T]`; with text, `labels [B, U]` padded with
            -100.

        Raises:
            ValueError: without audio and text, for different numbers of transcripts and waveforms, or from the
                extractor.
        """
        if audio is None and text is None:
            raise ValueError("audio or text must be given, got neither.")
        outputs = BatchFeature()
        if audio is not None:
            outputs.update(self.feature_extractor(audio, sampling_rate=sampling_rate, **kwargs))
        if text is not None:
            outputs["labels"] = self.labels(text)
        if audio is not None and text is not None and len(outputs["labels"]) != len(outputs["input_features"]):
            raise ValueError(
                f"text must hold one transcript per waveform, got {len(outputs['labels'])} for "
                f"{len(outputs['input_features'])}."
            )
        return outputs

    def labels(self, text: str | list[str]) -> Tensor:
        """Gives the token ids of transcripts `[B, U]`, padded with -100."""
        ids = self.tokenizer([text] if isinstance(text, str) else list(text))["input_ids"]
        return pad_sequence([torch.tensor(row, dtype=torch.long) for row in ids], True, IGNORED)


def train_tokenizer(
    texts: Iterable[str], model_type: str = "unigram", vocab_size: int | None = None, folder: str | Path | None = None
) -> ConformerTokenizer:
    """Trains word pieces with sentencepiece (Kudo and Richardson 2018, arXiv:1808.06226).

    The result depends on the texts alone, and its ids are those of sentencepiece's own encoder. Texts are not changed,
    except for runs of white space; see `normalize_transcript`.

    Args:
        texts: transcripts.
        model_type: "unigram" (default), "bpe" or "char".
        vocab_size: of the whole vocabulary, with the three special tokens. Default None: 256, or for "char" all
            characters; a smaller number turns the rarest characters into `<unk>`.
        folder: gets the tokenizer and the sentencepiece model, `spiece.model`. Default None: not saved.

    Returns:
        The tokenizer.

    Raises:
        ValueError: for an unknown `model_type`, no text, or a `vocab_size` that the texts do not allow; the message
            says the largest or smallest possible.

    Example:
        >>> from favor.models.speech import train_tokenizer
        >>> type(train_tokenizer(["good morning", "good evening"], "char")).__name__
        'ConformerTokenizer'
    """
    if model_type not in MODEL_TYPES:
        raise ValueError(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}.")
    lines = [" ".join(text.split()) for text in texts]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError("texts must hold at least one transcript that is not empty.")
    characters = len(set("".join(lines).replace(" ", SPACE)) | {SPACE})
    if vocab_size is None:
        vocab_size = characters + len(SPECIAL) if model_type == "char" else 256
    least = len(SPECIAL) + (1 if model_type == "char" else characters)
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} for these texts, got {vocab_size}.")
    # sentencepiece would silently return fewer.
    if model_type == "char" and vocab_size > characters + len(SPECIAL):
        raise _too_large(vocab_size, characters + len(SPECIAL), lines, model_type)
    needs("speech", "sentencepiece")
    import sentencepiece

    serialized = _train(lines, model_type, vocab_size)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=serialized)
    tokenizer = _from_pieces(pieces, model_type)
    if folder is not None:
        tokenizer.save_pretrained(folder)
        (Path(folder) / SENTENCEPIECE_FILE).write_bytes(serialized)
    return tokenizer


def _train(lines: list[str], model_type: str, vocab_size: int) -> bytes:
    import sentencepiece

    out, special = io.BytesIO(), dict[str, Any]()
    for number, name in enumerate(("pad", "eos", "unk")):
        special |= {f"{name}_id": number, f"{name}_piece": SPECIAL[number]}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            # Longer lines would silently be left out.
            max_sentence_length=4 * max(map(len, lines)) + 16,
            # Sums of floats depend on the number of threads.
            num_threads=1,
            bos_id=-1,
            minloglevel=2,
            **special,
        )
    except RuntimeError as error:
        limit = re.search(r"Vocabulary size too high .*<= (\d+)", str(error))
        if limit is None:
            raise
        raise _too_large(vocab_size, int(limit[1]), lines, model_type) from None
    return out.getvalue()


def _too_large(vocab_size: int, limit: int, lines: list[str], model_type: str) -> ValueError:
    return ValueError(
        f"vocab_size must be at most {limit} for {len(lines)} texts and model_type {model_type!r}, got {vocab_size}: "
        "lower it or give more text."
    )


def _from_pieces(pieces: sentencepiece.SentencePieceProcessor, model_type: str) -> ConformerTokenizer:
    """Builds the same segmentation in the tokenizers library."""
    scores = {pieces.id_to_piece(i): pieces.get_score(i) for i in range(pieces.get_piece_size())}
    unknown = SPECIAL.index("<unk>")
    if model_type == "bpe":
        ids = {piece: i for i, piece in enumerate(scores)}
        merges = generate_merges(ids, scores, skip_tokens=SPECIAL)
        backend = Tokenizer(BPE(vocab=ids, merges=merges, unk_token=SPECIAL[unknown], fuse_unk=True))
    else:
        backend = Tokenizer(Unigram(list(scores.items()), unk_id=unknown, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return tokenizer_of(backend)


def tokenizer_of(backend: Tokenizer, *more: normalizers.Normalizer) -> ConformerTokenizer:
    """Makes a tokenizer that takes any white space for one space, and then normalises more."""
    backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), *more])
    pad, end, unk = SPECIAL
    return ConformerTokenizer(
        tokenizer_object=backend, pad_token=pad, eos_token=end, unk_token=unk, padding_side="right"
    )
