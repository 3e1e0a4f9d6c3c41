"""Labels that a model gives to speech without transcripts, and the choice of labels to train on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from favor.integrations.modules import evaluating
from favor.models.speech import ConformerProcessor, Pronunciations, normalize_transcript
from favor.models.speech.word_beam import Scorer
from favor.train.speech.batches import Key
from favor.train.speech.data import Skipped, Utterance, check_lengths, long_enough
from favor.train.speech.loaders import evaluation_loader
from favor.train.speech.prepare import append_records, read_records
from favor.train.speech.transcribe import best_of, search

PART, PARTS = "labels.part-{}.jsonl", "labels*.jsonl"
IDENTITY = ("*.safetensors", "*config.json", "tokenizer.json")
ROUNDING = 1e-9  # residuals of a fit below this, relative to the values, are rounding alone


@dataclass(frozen=True)
class PseudoLabel:
    """Holds the transcript of one utterance that a teacher found: the best hypothesis, possibly empty.

    `audio` is the absolute path of its file, `log_prob` the natural logarithm of the probability of this hypothesis,
    and `tokens` its number of tokens of the teacher's tokenizer.
    """

    id: str
    audio: str
    text: str
    log_prob: float
    tokens: int
    seconds: float


def fingerprint(folder: str | Path) -> str:
    """Computes the identity of a saved model and its processor: a hash of weights, configurations and tokenizer.

    Raises ValueError if the folder holds no weights in safetensors.
    """
    folder = Path(folder)
    if not any(folder.glob(IDENTITY[0])):
        raise ValueError(
            f"folder must hold a saved model with *.safetensors, got {folder}: give one of favor.train.asr."
        )
    digest = hashlib.sha256()
    for path in sorted({path for pattern in IDENTITY for path in folder.glob(pattern)}):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def label(
    model: Any,
    processor: ConformerProcessor,
    utterances: Sequence[Utterance],
    folder: str | Path,
    *,
    teacher: str,
    beam_size: int = 8,
    scorer: Scorer | None = None,
    max_batch_seconds: float = 200.0,
    num_workers: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> None:
    """Transcribes utterances by beam search, without augmentation, into JSON lines in `folder`, which `collect` reads.

    Each batch is written and synced as soon as it is done, so that a killed labelling continues where it was. Batches
    depend on the utterances alone, so that neither a kill nor the number of shards changes a result. Transcripts of the
    utterances are not used.

    Args:
        model: a `ConformerForCTC` or `ConformerForTransducer`, on its device; it is set to evaluation mode.
        processor: the model's.
        utterances: with their lengths, which `prepare` finds, each in an audio file of its own: a label has its path.
        folder: where labels are kept; it is made if needed.
        teacher: identity of the model, from `fingerprint`, and of what the scorer has, if there is one.
        beam_size: hypotheses kept by the search. Default 8.
        scorer: language model, or known words, for the search of a CTC model. Default None: without.
        max_batch_seconds: padded seconds of a batch. Default 200.
        num_workers: processes that read audio ahead. Default 0: none.
        shard: (i, n) labels part i of n, from 0, for n processes that label at the same time. Default (0, 1): all.

    Raises:
        ValueError: for audio that is not a file, or a folder with labels of another teacher or beam.
    """
    check_files(utterances)
    folder, (process, processes) = Path(folder), shard
    settings = {"teacher": teacher, "beam_size": beam_size}
    known = _known(folder, settings)
    todo = {utterance.id for utterance in utterances if _place(utterance) not in known}
    untold = [dataclasses.replace(utterance, text="") for utterance in utterances]
    long = long_enough(untold, processor, Skipped(1.0))
    numbers = {utterance.id for utterance in long}

    def write(labels: Iterable[PseudoLabel]) -> None:
        if new := [dataclasses.asdict(one) for one in labels if one.id in todo]:
            append_records(folder / PART.format(process), settings, new)

    def mine(batches: list[list[Key]]) -> list[list[Key]]:
        return [batch for batch in batches[process::processes] if any(long[index].id in todo for _, index in batch)]

    if process == 0:
        write(_label(utterance, "", 0.0, 0) for utterance in untold if utterance.id not in numbers)
    if not long:
        return
    loader = evaluation_loader(long, processor, max_batch_seconds, num_workers=num_workers, choose=mine)
    with evaluating(model):
        for batch in tqdm(loader, desc="labelling", disable=process > 0 or not len(loader)):
            indices = batch.pop("index").tolist()
            beams = search(model, {k: v.to(model.device) for k, v in batch.items()}, beam_size, scorer=scorer)
            found = zip(indices, best_of(beams, processor.tokenizer), strict=True)
            write(_label(long[index], text, one.log_prob, len(one.tokens)) for index, (one, text) in found)


def check_files(utterances: Sequence[Utterance]) -> None:
    """Raises ValueError for an utterance whose audio is not a file of its own, since labels refer to files by path."""
    stored = [utterance for utterance in utterances if not isinstance(utterance.audio, Path)]
    if stored:
        raise ValueError(
            f"utterances must be audio files, since labels refer to them by path; {stored[0].id} is {stored[0].place}. "
            "Write the audio of a dataset of the hub, of tar shards, or of pieces of a recording to files first."
        )


def _place(utterance: Utterance) -> tuple[str, str]:
    """Gives what a label is found by: id and absolute path."""
    return utterance.id, os.path.abspath(utterance.place)


def _label(utterance: Utterance, text: str, log_prob: float, tokens: int) -> PseudoLabel:
    return PseudoLabel(*_place(utterance), text, log_prob, tokens, utterance.seconds or 0.0)


def _known(folder: Path, settings: dict[str, Any] | None = None) -> dict[tuple[str, str], PseudoLabel]:
    """Reads the labels of all processes; raises ValueError if some were made with other settings."""
    found = [one for path in sorted(folder.glob(PARTS)) for one in read_records(path, settings, PseudoLabel)]
    return {(one.id, one.audio): one for one in found}


def collect(utterances: Sequence[Utterance], folder: str | Path) -> list[PseudoLabel]:
    """Reads the labels of all utterances, in their order, when all shards of `label` are done.

    Raises ValueError if some labels are missing.
    """
    known = _known(Path(folder))
    missing = [utterance.id for utterance in utterances if _place(utterance) not in known]
    if missing:
        raise ValueError(f"{folder} lacks labels of {len(missing)} utterances, the first is {missing[0]}: label them.")
    return [known[_place(utterance)] for utterance in utterances]


def remove_labels(folder: Path) -> None:
    """Removes the files of `label`, and the folder if nothing else is in it."""
    for path in folder.glob(PARTS):
        path.unlink()
    with suppress(OSError):
        folder.rmdir()


@dataclass(frozen=True)
class ScoreFit:
    """Holds a fit of log probabilities S to numbers of tokens l: S = mu l + beta with deviation sigma sqrt(l)."""

    mu: float
    beta: float
    sigma: float


def fit_scores(labels: Sequence[PseudoLabel]) -> ScoreFit:
    """Fits log probabilities S to numbers of tokens l.

    mu and beta minimise sum_i (S_i - mu l_i - beta)^2. If all l_i are equal, or there is one label, many pairs minimise
    it, and the pair with the smallest mu^2 + beta^2 is taken. sigma is the standard deviation (divisor n) of
    (S_i - mu l_i - beta) / sqrt(l_i). After Park et al. 2020, "Improved Noisy Student Training for Automatic Speech
    Recognition", arXiv:2005.09629, on filtering, where S contains a language model's score as well and the fit is on a
    development set.

    Args:
        labels: labels without tokens are left out.

    Raises:
        ValueError: if no label has tokens.
    """
    labels = [one for one in labels if one.tokens]
    if not labels:
        raise ValueError("labels must hold a hypothesis with tokens, got none: train the teacher for longer.")
    lengths, log_probs = (np.array([getattr(one, key) for one in labels], float) for key in ("tokens", "log_prob"))
    design = np.stack([lengths, np.ones_like(lengths)], 1)
    (mu, beta), *_ = np.linalg.lstsq(design, log_probs, rcond=None)
    sigma = float(np.std((log_probs - design @ (mu, beta)) / np.sqrt(lengths)))
    return ScoreFit(float(mu), float(beta), sigma if sigma > ROUNDING * np.abs(log_probs).max() else 0.0)


def filter_scores(labels: Sequence[PseudoLabel], fit: ScoreFit) -> np.ndarray:
    """Computes the normalised filtering score s = (S - mu l - beta) / (sigma sqrt(l)) of each label, `[n]`.

    For labels like the fitted ones the score has about the same spread at all lengths. It is 0 where sigma is 0 (all
    points on a line, as two points always are), and minus infinity for a label without tokens.
    """
    lengths, log_probs = (np.array([getattr(one, key) for one in labels], float) for key in ("tokens", "log_prob"))
    spread = fit.sigma * np.sqrt(np.maximum(lengths, 1))
    residuals = log_probs - fit.mu * lengths - fit.beta
    scores = np.divide(residuals, spread, out=np.zeros_like(residuals), where=spread > 0)
    return np.where(lengths > 0, scores, -np.inf)


@dataclass(frozen=True)
class Selection:
    """The labels to train on, in their order, for the id of each other label the reason, and the fit of the scores."""

    kept: list[PseudoLabel]
    dropped: dict[str, str]
    fit: ScoreFit

    def counts(self) -> dict[str, int]:
        """Counts the dropped utterances by reason."""
        return dict(Counter(self.dropped.values()))


def select(
    labels: Sequence[PseudoLabel],
    processor: ConformerProcessor,
    *,
    keep: float = 1.0,
    ctc: bool = True,
    fastest: float = 1.0,
    max_seconds: float = math.inf,
    lexicon: Pronunciations | None = None,
) -> Selection:
    """Drops labels that a training cannot use, then labels with low scores.

    Args:
        labels: labels of one teacher.
        processor: processor of the training; transcripts must fit into their audio.
        keep: fraction of the usable labels to keep, those with the best scores; rounded, at least one. Default 1: all.
        ctc: whether equal neighbouring tokens need a blank between them, as in `needed_frames`. Default True.
        fastest: greatest speed factor of the training. Default 1.
        max_seconds: longest audio that the training takes. Default: no limit.
        lexicon: pronunciations of words, if the tokens of the training are phonemes. Default None: they are not.

    Raises:
        ValueError: for `keep` outside (0, 1], or if nothing is left; the message counts the reasons.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be a fraction, above 0 and at most 1, got {keep}.")
    dropped = {one.id: reason for one in labels if (reason := _unusable(one, max_seconds, lexicon))}
    usable = [one for one in labels if one.id not in dropped]
    if usable:
        write = str if lexicon is None else lexicon.write
        utterances = [Utterance(one.id, write(one.text), Path(one.audio), one.seconds) for one in usable]
        fitting = {u.id for u in check_lengths(utterances, processor, Skipped(1.0), ctc=ctc, fastest=fastest)}
        dropped |= {one.id: "more tokens than frames" for one in usable if one.id not in fitting}
        usable = [one for one in usable if one.id in fitting]
    if not usable:
        counts = ", ".join(f"{number} {reason}" for reason, number in Counter(dropped.values()).items())
        raise ValueError(f"no label can be used, of {len(labels)}: {counts}. Train the teacher for longer.")
    fit = fit_scores(usable)
    best = set(np.argsort(-filter_scores(usable, fit), kind="stable")[: max(1, round(keep * len(usable)))].tolist())
    dropped |= {one.id: "not among the best" for place, one in enumerate(usable) if place not in best}
    return Selection([one for place, one in enumerate(usable) if place in best], dropped, fit)


def _unusable(one: PseudoLabel, max_seconds: float, lexicon: Pronunciations | None) -> str | None:
    """Says why no training can use a label, whatever its score; None if a training can."""
    words = " ".join(one.text.split())
    if not words:
        return "no words"
    # Such as `<unk>`, which would be read as a word.
    if normalize_transcript(words) != words:
        return "symbols that no transcript has"
    if lexicon is not None and lexicon.missing(words):
        return "words without a pronunciation"
    return "longer than a batch" if one.seconds > max_seconds else None


def write_manifest(kept: Sequence[PseudoLabel], path: str | Path) -> Path:
    """Writes labels as a manifest for `read_manifest`, complete or not at all; returns its path."""
    path = Path(path)
    rows = [{key: getattr(one, key) for key in ("id", "audio", "text", "seconds")} for one in kept]
    partial_file = path.with_name(path.name + ".partial")
    partial_file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial_file, path)
    return path
