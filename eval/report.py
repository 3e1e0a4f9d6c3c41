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
import html
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import favor
from favor.eval.approximation import model as whole
from favor.eval.approximation.report import UNIFORM, Measured, spread
from favor.eval.approximation.variants import LOCAL, Variant, add_options, variants_of
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.program import device_or_default
from favor.eval.common.report import context, local_names, with_floats
from favor.eval.speed.measure import Stopwatch, interleaved, seconds
from favor.integrations.layer import attention_modules
from favor.train.common.program import Parser, program
from favor.train.text.samples import check_text, samples

TEMPLATE = Path(__file__).with_name("report.html")
# Text inside JSON must not end the element that holds it, or begin a comment.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}
# Passes that are timed: at least three, so that one pass that another process delays is not the median.
FEWEST, MOST = 3, 5
# A smaller gain in speed may be noise.
FASTER = 1.1
SCORES = {"cosine": "cosine of the embeddings to the exact ones"}
COMPARED = ("landmark", "favor#", "favor++", "favor+")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.report", __doc__)
    default = f"folder or hub name; default: the BERT in the package {PACKAGE}"
    parser.add_place("model_name_or_path", "model", default, needed=False)
    add = parser.add_argument
    add("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    add("--html", type=Path, default=Path("report.html"), help="file of the report")
    add("--lengths", nargs="+", type=int, default=[512, 2048, 4096], help="tokens of a sample; several are compared")
    add("--samples", type=int, default=1, help="samples of each length, evenly spaced over the text")
    add_options(parser, COMPARED, [0, 256, 768])
    add("--max_error", type=float, default=0.25, help="greatest mean error of a setting that is recommended")
    budget = "time of the measurement of each setting; at least three passes are timed"
    add("--seconds_per_cell", type=float, default=1.0, help=budget)
    arguments = parser.parse_args(argv)
    arguments.lengths = sorted(set(arguments.lengths))
    if min(*arguments.lengths, arguments.samples, arguments.query_samples) < 1:
        parser.error("--lengths, --samples and --query_samples must be at least 1")
    if not arguments.max_error > 0 or not arguments.seconds_per_cell > 0:
        parser.error("--max_error and --seconds_per_cell must be above 0")
    return arguments


@torch.no_grad()
def pass_seconds(
    model: PreTrainedModel, ids: Tensor, found: Sequence[Variant], seed: int, budget: float
) -> dict[Variant | None, float]:
    """Times forward passes of one sample, the settings in turns, so that a noisy machine delays all of them equally.

    Each setting must have run at this length before, so that no pass does work that is done only once.
    """
    device, one_pass = model.device.type, partial(model, **whole.text_inputs(model, ids))
    expected = seconds(one_pass, device)
    entries = {own: Stopwatch(one_pass, partial(whole.switch, model, own, seed), expected) for own in (None, *found)}
    timings = interleaved(entries, device, MOST, max(budget, FEWEST * expected * 1.01))
    whole.switch(model, None, seed)
    medians = {}
    for own, timing in timings.items():
        if isinstance(timing, Exception):
            raise timing
        medians[own] = timing.median
    return medians


@dataclass(frozen=True)
class Part:
    """Holds the measurements at one length."""

    measured: Measured
    seconds: Mapping[Variant | None, float]


def content(parts: Sequence[Part], measure: str, layers: Sequence[str], max_error: float) -> dict[str, Any]:
    """Gives the data that the page shows."""
    settings: list[dict[str, Any]] = []
    lengths: list[dict[str, Any]] = []
    for part in parts:
        own = [_setting(part, variant) for variant in part.measured.heads.variants if variant.is_backend]
        found, exact, close = part.measured, part.seconds[None], fastest(own, max_error)
        entry = {"length": found.length, "samples": found.samples, "seconds": exact, "score": found.exact}
        entry["uniform"] = found.errors(UNIFORM).tolist()
        entry["verdict"] = verdict(found.length, own, exact, max_error, measure)
        lengths.append({**entry, "fastest": None if close is None else len(settings) + own.index(close)})
        settings += own
    name = SCORES.get(measure, measure)
    return {"measure": name, "layers": list(layers), "max_error": max_error, "lengths": lengths, "settings": settings}


def _setting(part: Part, variant: Variant) -> dict[str, Any]:
    """Makes one entry of `settings`; K is None for attention that selects no keys."""
    measured, more = part.measured, dict(variant.more)
    keys = more.pop("selected_keys", None)
    errors = measured.errors(variant)
    options = {"features": variant.features, "num_features": variant.num_features, "selected_keys": keys, **more}
    options |= {"window": variant.window, "exact_below": measured.length}
    given = {name: value for name, value in options.items() if value is not None}
    words = [f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in given.items()]
    return {
        "backend": replace(variant, more=tuple(more.items())).label,
        "M": variant.num_features,
        "K": keys,
        "window": variant.window,
        "length": measured.length,
        "errors": errors.tolist(),
        "error": float(errors.double().mean()),
        "p90": spread(errors)["p90"],
        "score": measured.scores[variant],
        "seconds": part.seconds[variant],
        "code": f'favor.configure(model, "{variant.backend}", {", ".join(words)})',
    }


def fastest(settings: Sequence[dict[str, Any]], max_error: float) -> dict[str, Any] | None:
    """Finds the fastest setting whose mean error is at most `max_error`; None if there is none."""
    close = [setting for setting in settings if setting["error"] <= max_error]
    return min(close, key=lambda setting: setting["seconds"], default=None)


def verdict(length: int, settings: Sequence[dict[str, Any]], exact: float, max_error: float, measure: str) -> str:
    """Says in one or two sentences whether to use linear attention at a length."""
    best, start = fastest(settings, max_error), f"At {length:,} tokens"
    least = f"a mean error of {max_error:g} or less"
    if best is None:
        return f"{start} keep exact attention: no setting has {least}."
    if exact < FASTER * best["seconds"]:
        share = f"{best['seconds'] / exact:.2f} x its time"
        return f"{start} keep exact attention: {title(best)}, the fastest setting with {least}, takes {share}."
    speed, score = f"{exact / best['seconds']:.1f} x as fast as exact attention", SCORES.get(measure, measure)
    numbers = f"a mean error of {best['error']:.2f} ({score} {best['score']:.3f})"
    return f"{start} use {title(best)}: {speed}, with {numbers}."


def title(setting: Mapping[str, Any]) -> str:
    """Describes a setting in words, such as "landmark with M = 64, K = 256"."""
    words = [f"M = {setting['M']}"]
    if setting["K"] is not None:
        words.append(f"K = {setting['K']}")
    if setting["window"]:
        words.append(f"window {setting['window']}")
    return f"{setting['backend']} with {', '.join(words)}"


def render(data: Mapping[str, Any]) -> str:
    """Gives the page as text."""
    converted = with_floats(data, lambda number: round(number, 6) if math.isfinite(number) else None)
    verdicts = [html.escape(each["verdict"]) for each in reversed(data["lengths"])]
    filled = {
        "model": html.escape(data["model"]),
        "verdict": verdicts[0],
        "others": "\n".join(f"<li>{line}</li>" for line in verdicts[1:]),
        "max_error": f"{data['max_error']:g}",
        "facts": "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in data["facts"].items()),
        "data": json.dumps(converted, allow_nan=False, separators=(",", ":")).translate(ESCAPES),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], TEMPLATE.read_text(encoding="utf-8"))


def facts(model: PreTrainedModel, parts: Sequence[Part], layers: int, arguments: argparse.Namespace) -> dict[str, str]:
    """Describes the measurements in words, by name."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the page; raises ValueError if model or text do not exist, or the text is too short."""
    arguments = parse_arguments(argv)
    started = time.perf_counter()
    variants = variants_of(arguments.backends, arguments.num_features, arguments.windows, arguments.selected_keys)
    variants = [variant for variant in variants if variant.backend != LOCAL]
    if arguments.html.is_dir():
        raise ValueError(f"--html must be a file, and {arguments.html} is a folder")
    check_text(arguments.text)
    device = torch.device(device_or_default(None))
    tokenizer, model = whole.load(arguments.model or str(minilm_path()), device)
    # Check this before measuring, which takes minutes: a text may be too short, a model may have too few positions.
    texts = [samples(arguments.text, tokenizer, each, arguments.samples, arguments.seed) for each in arguments.lengths]
    for length in arguments.lengths:
        whole.placement(model, length, None)
    parts, options = [], {"seed": arguments.seed, "query_samples": arguments.query_samples}
    for ids in texts:
        measured = whole.measure(model, ids, variants, tokenizer.mask_token_id, **options)
        own = [variant for variant in variants if variant.is_backend]
        parts.append(Part(measured, pass_seconds(model, ids[:1], own, arguments.seed, arguments.seconds_per_cell)))
        print(f"{ids.shape[1]} tokens measured, {time.perf_counter() - started:.0f} s", flush=True)
    names, modules = {module: name for name, module in model.named_modules()}, attention_modules(model)
    layers = [names[modules[number]] for number in sorted(parts[0].measured.heads.errors[variants[0]])]
    found = content(parts, whole.measure_of(model), layers, arguments.max_error)
    known = {
        "model": local_names([arguments.model or PACKAGE])[0],
        "facts": facts(model, parts, len(layers), arguments),
    }
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    arguments.html.write_text(render({**known, **found}), encoding="utf-8")
    print("\n".join(each["verdict"] for each in found["lengths"]))
    print(f"{arguments.html} is the report; open it in a browser.")
    return 0


cli = program("favor.eval.report", main)


if __name__ == "__main__":
    cli()
