"""Texts of a beam search, scored a second time: by a causal language model, or by a Whisper."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from favor.train.speech.batches import label_ids
from favor.train.speech.data import Utterance, read_audio

Texts = Sequence[Sequence[tuple[str, float]]]

TEXTS = 32  # scored at once: the probabilities of Whisper's tokens take 6 MB a word, those of a larger vocabulary more


def texts_before(utterances: Sequence[Utterance], texts: Sequence[str], most: int) -> list[list[str]]:
    """Gives for each utterance the texts of up to `most` utterances before it in its chapter, the nearest last.

    Args:
        utterances: in their order. One without a chapter has nothing before it.
        texts: of each utterance.
        most: at least 0.
    """
    found = []
    said: dict[tuple[str | None, str | None], list[str]] = defaultdict(list)
    for one, text in zip(utterances, texts, strict=True):
        own = said[one.speaker, one.chapter]
        found.append(own[max(0, len(own) - most) :] if one.chapter else [])
        own.append(text)
    return found


@torch.no_grad()
def language_scores(
    model: Any, tokenizer: Any, texts: Texts, before: Sequence[Sequence[str]] | None = None
) -> list[list[float]]:
    """Computes the log probability that a causal language model gives to each text, the end of its line included.

    Each text follows the first token of the tokenizer (its beginning of texts, else their end) and the texts before
    it, one a line. Texts in capitals alone become small letters.

    Args:
        model: a causal language model of transformers.
        tokenizer: that of the model.
        texts: of each utterance, with the scores of the search, which are not used.
        before: what was said before each utterance. Default None: nothing, each text stands alone.

    Raises:
        ValueError: if the tokenizer has no token for the beginning or the end of a text.
    """
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise ValueError("the tokenizer must have a bos_token or an eos_token, which the first word of a text follows")
    found = []
    for own, said in zip(texts, before or [[]] * len(texts), strict=True):
        first = [start, *itertools.chain.from_iterable(_line_ids(tokenizer, said))]
        # All texts follow the same tokens, so keys and values of these are computed once and repeated.
        cache = model(input_ids=torch.tensor([first[:-1]])).past_key_values if said else None
        scores: list[float] = []
        for some in _pieces(_line_ids(tokenizer, [text for text, _ in own])):
            labels = pad_sequence([torch.tensor([first[-1], *ids]) for ids in some], True, -100)
            rows = _repeated(cache, len(some))
            logits = model(input_ids=labels[:, :-1].clamp_min(0), past_key_values=rows).logits
            scores += _said(logits, labels[:, 1:])
        found.append(scores)
    return found


def _line_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Gives the tokens of each text and of the end of its line, in small letters if it is in capitals alone."""
    lines = [(text.lower() if text.isupper() else text) + "\n" for text in texts]
    ids: list[list[int]] = tokenizer(lines, add_special_tokens=False).input_ids if lines else []
    return ids


def _repeated(cache: Any, rows: int) -> Any:
    """Copies keys and values of one row for several rows."""
    if cache is not None:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(rows)
    return cache


@torch.no_grad()
def text_scores(model: Any, processor: Any, utterances: Sequence[Utterance], texts: Texts) -> list[list[float]]:
    """Computes the log probability that a Whisper gives to each text of each utterance, its end included.

    Texts in capitals alone become small letters, since Whisper has few tokens for words in capitals. Audio after 30
    seconds is not heard.

    Args:
        model: a Whisper.
        processor: that of the model.
        utterances: the audio.
        texts: of each utterance, with the scores of the search, which are not used.
    """
    extractor, start = processor.feature_extractor, model.config.decoder_start_token_id
    found = []
    for utterance, own in zip(utterances, texts, strict=True):
        audio = read_audio(utterance, extractor.sampling_rate)
        features = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
        states = model.model.encoder(features).last_hidden_state
        # All texts begin with one token, so keys and values of the audio are computed once and repeated.
        first = model.model.decoder(torch.tensor([[start]]), encoder_hidden_states=states, use_cache=True)
        rows = [torch.tensor(ids) for ids in label_ids(processor.tokenizer, [text for text, _ in own])]
        scores: list[float] = []
        for some in _pieces(rows):
            scores += _following(model, first, states, pad_sequence(some, True, -100))
        found.append(scores)
    return found


def _following(model: Any, first: Any, states: Tensor, labels: Tensor) -> list[float]:
    """Computes the log probabilities of texts `[n, U]`, padded with -100, after the first step of the decoder."""
    cache = _repeated(first.past_key_values, len(labels))
    states = states.expand(len(labels), -1, -1)
    rest = model.model.decoder(
        labels[:, :-1].clamp_min(0), encoder_hidden_states=states, past_key_values=cache, use_cache=True
    )
    begun = first.last_hidden_state.expand(len(labels), -1, -1)
    return _said(model.proj_out(torch.cat([begun, rest.last_hidden_state], 1)), labels)


def _pieces(rows: list[Any]) -> Iterator[list[Any]]:
    """Splits rows into those that are scored at once."""
    for place in range(0, len(rows), TEXTS):
        yield rows[place : place + TEXTS]


def _said(logits: Tensor, labels: Tensor) -> list[float]:
    """Sums the log probabilities of labels `[n, U]`, padded with -100, given logits `[n, U, V]`."""
    losses = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    scores: list[float] = (-losses.view_as(labels).sum(1)).tolist()
    return scores


def rescored(
    texts: Texts, scores: Sequence[Sequence[Sequence[float]]], weights: Sequence[float]
) -> list[list[tuple[str, float]]]:
    """Adds more scores to those of the search; gives the texts again, the best sum first.

    Args:
        texts: of each utterance, with the scores of the search.
        scores: of each model, for each text of each utterance.
        weights: of each model.
    """
    found = []
    for own, *more in zip(texts, *scores, strict=True):
        sums = [sum(map(operator.mul, weights, some)) for some in zip(*more, strict=True)]
        both = ((text, score + extra) for (text, score), extra in zip(own, sums, strict=True))
        found.append(sorted(both, key=lambda pair: -pair[1]))
    return found
