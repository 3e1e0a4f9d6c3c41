"""Scores of tokens in each frame, for CTC: logits of one model, or the mean of the log probabilities of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from favor.eval import asr
from favor.models.speech import ConformerProcessor
from favor.models.speech.pronunciations import lexicon_of
from favor.train.common.arguments import BackendArguments
from favor.train.speech.data import Utterance
from favor.train.speech.loaders import evaluation_loader
from favor_command.saved import load_processor

Parts = Mapping[str, Sequence[Utterance]]


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


def heard(folder: str, parts: Parts) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Loads a model; gives the logits of the utterances of each part, and "kind", "parameters" and "attention"."""
    model, processor = asr.load(folder, BackendArguments())
    facts = {"kind": type(model).__name__, "parameters": model.num_parameters()}
    facts["attention"] = model.config._attn_implementation
    return {name: logits_of(model.eval(), processor, part) for name, part in parts.items()}, facts


def frame_scores(folders: Sequence[str], parts: Parts) -> tuple[dict[str, list[Tensor]], list[dict[str, Any]]]:
    """Computes the scores `[L, V]` of each utterance: logits of one model, the mean of log probabilities of several.

    The exponential of the mean is the geometric mean of the distributions. It does not add up to 1, so search and
    alignment take it as logits. One model is in memory at a time.

    Args:
        folders: of models that `check_alike` accepts.
        parts: utterances, by the name of their part.

    Returns:
        The scores of each part, and the facts about each model that `heard` gives.
    """
    scores: dict[str, list[Tensor]] = {}
    facts = []
    for folder in folders:
        logits, own = heard(folder, parts)
        facts.append(own)
        for name, rows in logits.items():
            if len(folders) > 1:
                rows = [torch.log_softmax(row, -1, dtype=torch.float32) / len(folders) for row in rows]
            scores[name] = [*map(torch.add, scores[name], rows)] if name in scores else rows
    return scores, facts


def check_alike(folders: Sequence[str], lexicon: Path | None) -> None:
    """Raises ValueError for models whose scores have no mean, since their frames or tokens differ.

    Args:
        folders: of the models.
        lexicon: pronunciations for all of them. Default None: those that are saved with each model must be equal.
    """
    first, *others = (traits(folder, lexicon) for folder in folders)
    for folder, own in zip(folders[1:], others, strict=True):
        for expected, got in zip(first, own, strict=False):  # counts come first, so lists of other lengths differ
            if expected != got:
                raise ValueError(
                    "models whose log probabilities are averaged must have the same frames, blank, tokens and "
                    f"pronunciations: {folders[0]} has {expected}, {folder} has {got}. Leave one of them out, or train "
                    "it with the tokenizer of the other; --lexicon names one file of pronunciations for all."
                )


def traits(folder: str, lexicon: Path | None) -> list[str]:
    """Lists in words what models must share: frames, blank, tokens and pronunciations, counts before their items."""
    config, processor = asr.speech_config(folder), load_processor(folder, ConformerProcessor)
    rate, count = processor.feature_extractor.sampling_rate, len(processor.tokenizer)
    tokens = processor.tokenizer.convert_ids_to_tokens(range(count))
    pronunciations = lexicon_of(lexicon, folder)
    spoken = {} if pronunciations is None else pronunciations.spoken
    return [
        f"frames of {config.samples_per_frame} samples at {rate} Hz",
        f"token {config.pad_token_id} as blank",
        f"{count} tokens",
        *(f"{token!r} as token {place}" for place, token in enumerate(tokens)),
        f"pronunciations of {len(spoken)} words",
        *(f"{word} spoken {', '.join(map(' '.join, own))}" for word, own in spoken.items()),
    ]
