"""Word error rates of a pretrained Whisper with linear attention in its encoder, without training."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import favor
from favor.eval.approximation.variants import Variant, chosen_name, variants_of
from favor.eval.common import report
from favor.eval.options.whisper import parse_arguments
from favor.eval.speech.whisper_convert import convert, packaged_folder
from favor.train.common.program import program
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import ErrorCounts, word_errors

RATE = 16000


@dataclass(frozen=True)
class Piece:
    """Consecutive utterances of one chapter.

    Attributes:
        utterances: the utterances, in order.
        seconds: their total length.
    """

    utterances: tuple[Utterance, ...]
    seconds: float

    @property
    def text(self) -> str:
        """The transcript."""
        return " ".join(utterance.text for utterance in self.utterances)

    def audio(self) -> np.ndarray:
        """Reads the samples of the utterances, one after another."""
        return np.concatenate([read_audio(utterance, RATE) for utterance in self.utterances])


def load(folder: Path | None) -> tuple[Any, Any]:
    """Loads model and processor of a folder, or those of the package.

    Raises:
        ValueError: if there is no such folder, it holds no Whisper, or the package is not installed.
    """
    folder = packaged_folder() if folder is None else folder
    if (folder / "model.bin").is_file():
        return convert(folder)
    config = folder / "config.json"
    kind = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    if kind != "whisper":
        raise ValueError(
            f"expected the folder of a Whisper, got {folder}, which holds {f'a {kind}' if kind else 'no model'}"
        )
    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval(), WhisperProcessor.from_pretrained(folder)


def cut(utterances: Sequence[Utterance], least: float, most: float, number: int) -> list[Piece]:
    """Joins utterances into pieces of `least` to `most` seconds; takes the first pieces of each speaker.

    Args:
        utterances: of any speakers, in the order of their chapters.
        least, most: seconds of a piece.
        number: greatest number of pieces per speaker.

    Raises:
        ValueError: if there is no such piece.
    """
    found: dict[str, list[Piece]] = {}
    waiting: list[Utterance] = []
    for utterance in utterances:
        if waiting and (waiting[-1].speaker, waiting[-1].chapter) != (utterance.speaker, utterance.chapter):
            waiting = []
        waiting.append(utterance)
        while sum(each.seconds or 0.0 for each in waiting) > most:
            waiting.pop(0)
        seconds = sum(each.seconds or 0.0 for each in waiting)
        if seconds >= least:
            found.setdefault(utterance.speaker or "", []).append(Piece(tuple(waiting), seconds))
            waiting = []
    pieces = [piece for own in found.values() for piece in own[:number]]
    if not pieces:
        raise ValueError(f"no consecutive utterances are {least:g} to {most:g} seconds long: change --seconds")
    return pieces


def features_of(processor: Any, pieces: Sequence[Piece]) -> Tensor:
    """Computes what the encoder reads, `[pieces, bins, 3000]`."""
    sounds = [piece.audio() for piece in pieces]
    return processor(sounds, sampling_rate=RATE, return_tensors="pt").input_features


@torch.no_grad()
def transcribe(model: Any, processor: Any, pieces: Sequence[Piece], arguments: argparse.Namespace) -> list[str]:
    """Transcribes each piece with the model.

    Args:
        model: a Whisper.
        processor: that of the model.
        pieces: the audio.
        arguments: of the program.
    """
    texts = []
    for start in range(0, len(pieces), arguments.batch_size):
        features = features_of(processor, pieces[start : start + arguments.batch_size]).to(model.device)
        ids = model.generate(features, max_new_tokens=arguments.max_new_tokens, do_sample=False, num_beams=1)
        texts += processor.batch_decode(ids, skip_special_tokens=True)
    return texts


def ratio_error(errors: Sequence[int], words: Sequence[int]) -> float:
    """Computes the standard error of sum(errors) / sum(words), over the pieces."""
    counts, sizes = np.asarray(errors, float), np.asarray(words, float)
    if len(sizes) < 2:
        return math.nan
    residuals = counts - counts.sum() / sizes.sum() * sizes
    return float(np.sqrt(len(sizes) / (len(sizes) - 1) * np.square(residuals).sum()) / sizes.sum())


def row(variant: Variant | None, counts: Sequence[ErrorCounts], exact: Sequence[ErrorCounts]) -> dict[str, Any]:
    """Makes a row of the table: error rates as fractions, with their standard errors, and the counts of each piece.

    Args:
        variant: the attention; None is exact attention.
        counts: edits of each piece.
        exact: edits of each piece with exact attention.
    """
    errors, words = [each.errors for each in counts], [each.reference_length for each in counts]
    difference = [each.errors - other.errors for each, other in zip(counts, exact, strict=True)]
    return {
        "attention": "exact" if variant is None else variant.label,
        "num_features": None if variant is None else variant.num_features,
        "window": None if variant is None else variant.window,
        "options": {} if variant is None else dict(variant.more),
        "wer": sum(errors) / sum(words),
        "standard_error": ratio_error(errors, words),
        "difference": sum(difference) / sum(words),
        "difference_error": ratio_error(difference, words),
        **asdict(sum(counts, ErrorCounts())),
        "errors_of_pieces": errors,
    }


def lines(rows: Sequence[dict[str, Any]], facts: str) -> list[str]:
    """Writes the report in Markdown."""
    head = ["attention of the encoder", "M", "window", "WER, %", "standard error", "minus exact, points", "its error"]
    body = []
    for each in rows:
        name = each["attention"] if each["num_features"] is None else f"`{each['attention']}`"
        cells = [name, str(each["num_features"] or "-"), str(each["window"] or "-")]
        cells += [f"{100 * each[key]:.2f}" for key in ("wer", "standard_error")]
        cells += [f"{100 * each['difference']:+.2f}", f"{100 * each['difference_error']:.2f}"]
        body.append([*cells[:5], "-", "-"] if each["num_features"] is None else cells)
    return [
        "# Whisper with linear attention in its encoder, nothing trained",
        "",
        facts,
        "",
        *report.table(head, body),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the report."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    lists = (arguments.num_features, arguments.windows, arguments.selected_keys)
    variants = [variant for variant in variants_of(arguments.backends, *lists) if variant.is_backend]
    budgets = {Variant("landmark", None, 0, 0, chosen_name(budget)): budget for budget in arguments.flop_budgets}
    model, processor = load(arguments.model)
    least, most = arguments.seconds
    pieces = cut(load_speech(arguments.data_dir, arguments.split)[0], least, most, arguments.pieces)
    if arguments.choose_on:
        others = cut(load_speech(arguments.data_dir, arguments.choose_on)[0], least, most, 1)
        read = [{"input_features": features_of(processor, [piece]).to(model.device)} for piece in others]
    normalize = EnglishTextNormalizer({})
    references = [normalize(piece.text) for piece in pieces]
    model.set_attn_implementation("sdpa")
    rows: list[dict[str, Any]] = []
    exact: list[ErrorCounts] = []
    for variant in [None, *variants, *budgets]:
        if variant in budgets:
            how = {"layers": "auto", "flop_budget": budgets[variant], "exact_below": 0}
            favor.convert(model.get_encoder(), "landmark", dataloader=read, **how)
        elif variant is not None:
            favor.configure(model, variant.backend, only="model.encoder", **variant.options(arguments.seed))
        heard = [normalize(text) for text in transcribe(model, processor, pieces, arguments)]
        counts = [word_errors([said], [text]) for said, text in zip(references, heard, strict=True)]
        exact = exact or counts
        rows.append(row(variant, counts, exact))
        name = "exact" if variant is None else variant.title
        print(f"{name}: {100 * rows[-1]['wer']:.2f} % ({100 * rows[-1]['difference']:+.2f})", flush=True)
    speakers = len({piece.utterances[0].speaker for piece in pieces})
    seconds = sorted(piece.seconds for piece in pieces)
    facts = (
        f"{'Whisper tiny.en' if arguments.model is None else arguments.model.resolve().name}, "
        f"{len(pieces)} pieces of {seconds[0]:.0f} to {seconds[-1]:.0f} seconds, {speakers} speakers, "
        f"{sum(each.reference_length for each in exact)} words of {arguments.split}; "
        f"{model.config.max_source_positions} frames of the encoder, seed {arguments.seed}. "
        "Errors: standard errors over pieces, the last one of the difference."
    )
    if arguments.choose_on:
        facts += f" Settings of each layer: chosen on {len(read)} pieces of {arguments.choose_on}, one per speaker."
    command = report.shown_command("favor.eval.whisper", words, ["--data_dir"], ["--output_dir"])
    content = report.context(command, ("transformers", "jiwer")) | {
        "facts": facts,
        "seed": arguments.seed,
        "pieces": [[utterance.id for utterance in piece.utterances] for piece in pieces],
        "words_of_pieces": [each.reference_length for each in exact],
        "rows": rows,
    }
    report.write(arguments.output_dir, arguments.name, lines(rows, facts), content, [])
    print("\n".join(["", *lines(rows, facts)]))
    return 0


cli = program("favor.eval.whisper", main)


if __name__ == "__main__":
    cli()
