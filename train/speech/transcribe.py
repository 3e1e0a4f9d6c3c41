"""Text of batches of speech, by CTC or Transducer, with greedy or beam search, or by Whisper, with greedy search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from favor.models.conformer import Chunks, ConformerForCTC, ConformerForTransducer
from favor.models.speech import (
    Hypothesis,
    Pronunciations,
    WordLexicon,
    ctc_greedy,
    ctc_prefix_beam,
    ctc_word_beam,
    transducer_beam,
    transducer_greedy,
)
from favor.models.speech.word_beam import Scorer

_MOST_TOKENS = 224  # of a transcript of a Whisper, as in OpenAI's program


@torch.no_grad()
def search(
    model: Any, batch: dict[str, Any], beam_size: int, chunks: Chunks | None = None, scorer: Scorer | None = None
) -> list[list[Hypothesis]]:
    """Runs a beam search; returns the hypotheses of each utterance, the most probable first.

    The model, in evaluation mode, is a `ConformerForCTC` or `ConformerForTransducer`. The arguments are those of
    `transcribe`. With a `WordLexicon` there can be no hypothesis.
    """
    features, mask = batch["input_features"], batch.get("attention_mask")
    if scorer is not None:
        return ctc_word_beam(*_logits(model, features, mask, chunks), scorer, beam_size, model.config.pad_token_id)
    if isinstance(model, ConformerForTransducer):
        return transducer_beam(model, *model.encode(features, mask, chunks), beam_size=beam_size)
    return ctc_prefix_beam(
        *_logits(model, features, mask, chunks), beam_size=beam_size, blank=model.config.pad_token_id
    )


def best_of(beams: Sequence[Sequence[Hypothesis]], tokenizer: Any) -> list[tuple[Hypothesis, str]]:
    """Gives the first hypothesis of each utterance, one without tokens if there is none, and its text."""
    best = [beam[0] if beam else Hypothesis([], 0.0) for beam in beams]
    return [
        (one, " ".join(one.words) if one.words else tokenizer.decode(list(one.tokens), group_tokens=False))
        for one in best
    ]


@torch.no_grad()
def transcribe(
    model: Any,
    batch: dict[str, Any],
    tokenizer: Any,
    beam_size: int | None = 1,
    scorer: Scorer | None = None,
    chunks: Chunks | None = None,
    lexicon: Pronunciations | None = None,
) -> list[str]:
    """Gives the text of each utterance of a batch.

    Args:
        model: a `ConformerForCTC`, `ConformerForTransducer` or `WhisperForConditionalGeneration` in evaluation mode.
        batch: `input_features` `[B, T, F]` and `attention_mask` `[B, T]`, on the model's device; for Whisper
            `input_features` `[B, F, T]`.
        tokenizer: that of the model.
        beam_size: hypotheses of a beam search. Default 1: greedy search, the only one for Whisper here. None is the
            usual number of a search of words.
        scorer: language model and hotwords, or known words, for the beam search of a CTC model. Default None: without.
        chunks: in which a Conformer hears, as in a stream. Default None: whole utterances.
        lexicon: makes words of the phonemes that a search without a scorer finds. Default None: the tokens are letters
            or word pieces.
    """
    if isinstance(model, WhisperForConditionalGeneration):
        return say(model, batch["input_features"], tokenizer)
    features, mask = batch["input_features"], batch.get("attention_mask")
    if beam_size is None:
        beam_size = 1 if scorer is None else scorer.beam_size
    if scorer is not None or beam_size > 1:
        texts = [text for _, text in best_of(search(model, batch, beam_size, chunks, scorer), tokenizer)]
    else:
        if isinstance(model, ConformerForTransducer):
            tokens = transducer_greedy(model, *model.encode(features, mask, chunks))
        else:
            tokens = ctc_greedy(*_logits(model, features, mask, chunks), blank=model.config.pad_token_id)
        texts = [tokenizer.decode(list(ids), group_tokens=False) for ids in tokens]
    if lexicon is None or isinstance(scorer, WordLexicon):
        return texts
    return [lexicon.read(text) for text in texts]


def _logits(model: ConformerForCTC, features: Any, mask: Any, chunks: Chunks | None) -> tuple[Any, Any]:
    logits = model(features, mask, **({} if chunks is None else {"chunks": chunks})).logits.float()
    lengths = torch.full((len(features),), features.shape[1]) if mask is None else mask.sum(-1)
    return logits, model.subsampled_lengths(lengths)


@torch.no_grad()
def say(model: WhisperForConditionalGeneration, features: Tensor, tokenizer: Any) -> list[str]:
    """Transcribes features `[B, F, T]` greedily."""
    most = min(_MOST_TOKENS, model.config.max_target_positions - 4)
    ids = model.generate(features, max_new_tokens=most, do_sample=False, num_beams=1)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def normalizer(model: WhisperForConditionalGeneration, tokenizer: Any) -> Callable[[str], str]:
    """Gives the function that words of both sides go through before they are compared, as Whisper's authors did."""
    if getattr(model.generation_config, "is_multilingual", False):
        return BasicTextNormalizer()
    return EnglishTextNormalizer(getattr(tokenizer, "english_spelling_normalizer", None) or {})
