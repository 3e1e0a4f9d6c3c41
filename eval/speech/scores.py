"""Scores for CTC: of tokens in each frame, by one model or several, and of texts, by a language model or a Whisper."""

from __future__ import annotations

import copy
import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from favor.eval import asr
from favor.models.speech import ConformerProcessor
from favor.models.speech.pronunciations import lexicon_of
from favor.train.common.arguments import BackendArguments
from favor.train.speech.batches import label_ids
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.loaders import evaluation_loader
from favor_command.saved import load_processor

Parts = Mapping[str, Sequence[Utterance]]
Texts = Sequence[Sequence[tuple[str, float]]]

TEXTS = 32  # scored at once: the probabilities of Whisper's tokens take 6 MB a word, those of a larger vocabulary more


@torch.no_grad()
def logits_of(model: Any, processor: Any, utterances: Sequence[Utterance]) -> list[Tensor]:
    """Computes the logits `[L, V]` of each utterance."""
    found: dict[int, Tensor] = {}
    for batch in evaluation_loader(utterances, processor, 100.0):
        rows = model(batch["input_features"], batch["attention_mask"]).logits
        lengths = model.subsampled_lengths(batch["attention_mask"].sum(1))
        for index, row, length in zip(batch["index"].tolist(), rows, lengths.tolist(), strict=True):
            found[index] = row[:length].clone()
    return [found[index] for index in range(len(utterances))]


def frame_scores(folders: Sequence[str], parts: Parts) -> tuple[dict[str, list[Tensor]], list[dict[str, Any]]]:
    """Computes the scores `[L, V]` of each utterance: logits of one model, the mean of log probabilities of several.

    The exponential of the mean is the geometric mean of the distributions. It does not add up to 1, so search and
    alignment take it as logits. One model is in memory at a time.
    """
    scores: dict[str, list[Tensor]] = {}
    facts = []
    for folder in folders:
        model, processor = asr.load(folder, BackendArguments())
        facts.append({"kind": type(model).__name__, "parameters": model.num_parameters()})
        facts[-1]["attention"] = model.config._attn_implementation
        for name, part in parts.items():
            rows = logits_of(model.eval(), processor, part)
            if len(folders) > 1:
                rows = [torch.log_softmax(row, -1, dtype=torch.float32) / len(folders) for row in rows]
            scores[name] = [*map(torch.add, scores[name], rows)] if name in scores else rows
        del model
    return scores, facts


def check_alike(folders: Sequence[str], lexicon: Path | None) -> None:
    """Raises ValueError for models whose scores have no mean, since their frames or tokens differ.

    Their pronunciations must be equal too, unless a lexicon is given for all of them.
    """
    first = _traits(folders[0], lexicon)
    for folder in folders[1:]:
        own = _traits(folder, lexicon)
        if wrong := [name for name, expected in first.items() if own[name] != expected]:
            raise ValueError(
                "models whose log probabilities are averaged must have the same frames, blank, tokens and "
                f"pronunciations, but {folder} has other {wrong[0]} than {folders[0]}. Leave one of them out, or train "
                "it with the tokenizer of the other; --lexicon names one file of pronunciations for all."
            )


def _traits(folder: str, lexicon: Path | None) -> dict[str, Any]:
    """Gives what models must share."""
    config, processor = asr.speech_config(folder), load_processor(folder, ConformerProcessor)
    tokens = processor.tokenizer.convert_ids_to_tokens(range(len(processor.tokenizer)))
    pronunciations = lexicon_of(lexicon, folder)
    return {
        "frames": (config.samples_per_frame, processor.feature_extractor.sampling_rate),
        "tokens": (tokens, config.pad_token_id),
        "pronunciations": pronunciations and pronunciations.spoken,
    }


def texts_before(utterances: Sequence[Utterance], texts: Sequence[str], most: int) -> list[list[str]]:
    """Gives for each utterance the texts of up to `most` utterances before it in its chapter, the nearest last."""
    found = []
    said: dict[tuple[str | None, str | None], deque[str]] = defaultdict(partial(deque, maxlen=most))
    for one, text in zip(utterances, texts, strict=True):
        own = said[one.speaker, one.chapter]
        found.append([*own] if one.chapter else [])
        own.append(text)
    return found


@torch.no_grad()
def language_scores(
    model: Any, tokenizer: Any, texts: Texts, before: Sequence[Sequence[str]] | None = None
) -> list[list[float]]:
    """Computes the log probability that a causal language model gives to each text, the end of its line included.

    Each text follows the first token of the tokenizer (its beginning of texts, else their end) and the texts before
    it, one a line. Texts in capitals alone become small letters.
    """
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise ValueError("the tokenizer must have a bos_token or an eos_token, which the first word of a text follows")

    def line_ids(texts: Sequence[str]) -> list[list[int]]:
        lines = [(text.lower() if text.isupper() else text) + "\n" for text in texts]
        return list(tokenizer(lines, add_special_tokens=False).input_ids) if lines else []

    found = []
    for own, said in zip(texts, before or [[]] * len(texts), strict=True):
        first = [start, *itertools.chain.from_iterable(line_ids(said))]
        # All texts follow the same tokens, so keys and values of these are computed once and repeated.
        cache = model(input_ids=torch.tensor([first[:-1]])).past_key_values if said else None
        scores: list[float] = []
        for some in _pieces(line_ids([text for text, _ in own])):
            labels = pad_sequence([torch.tensor([first[-1], *ids]) for ids in some], True, -100)
            rows = _repeated(cache, len(some))
            logits = model(input_ids=labels[:, :-1].clamp_min(0), past_key_values=rows).logits
            scores += _said(logits, labels[:, 1:])
        found.append(scores)
    return found


@torch.no_grad()
def text_scores(model: Any, processor: Any, utterances: Sequence[Utterance], texts: Texts) -> list[list[float]]:
    """Computes the log probability that a Whisper gives to each text of each utterance, its end included.

    Texts in capitals alone become small letters, since Whisper has few tokens for words in capitals. Audio after 30
    seconds is not heard.
    """
    extractor, start = processor.feature_extractor, model.config.decoder_start_token_id
    found = []
    for utterance, own in zip(utterances, texts, strict=True):
        audio = read_audio(utterance, extractor.sampling_rate)
        features = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
        states = model.model.encoder(features).last_hidden_state
        # All texts begin with one token, so keys and values of the audio are computed once and repeated.
        first = model.model.decoder(torch.tensor([[start]]), encoder_hidden_states=states, use_cache=True)
        scores: list[float] = []
        for some in _pieces(label_ids(processor.tokenizer, [text for text, _ in own])):
            labels = pad_sequence([torch.tensor(ids) for ids in some], True, -100)
            many, cache = len(labels), _repeated(first.past_key_values, len(labels))
            given = {"encoder_hidden_states": states.expand(many, -1, -1), "past_key_values": cache, "use_cache": True}
            rest = model.model.decoder(labels[:, :-1].clamp_min(0), **given).last_hidden_state
            hidden = torch.cat([first.last_hidden_state.expand(many, -1, -1), rest], 1)
            scores += _said(model.proj_out(hidden), labels)
        found.append(scores)
    return found


def _repeated(cache: Any, rows: int) -> Any:
    """Copies keys and values of one row for several rows."""
    if cache is not None:
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(rows)
    return cache


def _pieces(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
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
    """Adds more scores to those of the search; gives the texts again, the best sum first."""
    found = []
    for own, *more in zip(texts, *scores, strict=True):
        sums = [sum(map(operator.mul, weights, some)) for some in zip(*more, strict=True)]
        both = ((text, score + extra) for (text, score), extra in zip(own, sums, strict=True))
        found.append(sorted(both, key=lambda pair: -pair[1]))
    return found
