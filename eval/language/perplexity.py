"""Perplexity of a causal language model on long texts, by length and attention, also of the second half alone.

    python -m favor.eval.language.perplexity MODEL --texts novels.txt.xz --lengths 2048 4096

MODEL is a folder, or "gemma" (Gemma 3 270M from packages of PyPI: an optional experiment under its own terms of use).
Samples are evenly spaced over each text. Exact attention comes first. For each other variant the table says by how much
its perplexity is greater, with the standard error of the difference, paired by sample. The results of each sample are
kept in NAME.jsonl, so that the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favor.eval.common import report
from favor.eval.common.processes import processes, shared_program
from favor.eval.language import program as shared
from favor.eval.language.models import load
from favor.train.common.program import Parser
from favor.train.text.samples import samples

NAME = "favor.eval.language.perplexity"


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones, raises ValueError for bad variants."""
    parser = Parser(NAME, __doc__)
    shared.options(parser, "perplexity")
    add = parser.add_argument
    add("--texts", nargs="+", required=True, metavar="TEXT", help="texts: UTF-8, plain, .gz or .xz")
    add("--samples", type=int, default=8, help="samples of each text and length")
    arguments = shared.prepare(parser, words)
    if min(arguments.lengths) < 4 or arguments.samples < 1:
        parser.error("--lengths must be at least 4 and --samples at least 1")
    return arguments


# Tokens whose logits are computed at a time: a vocabulary may have 262,144 entries, too many for all tokens at once.
SLICE = 256
PARTS = ("all", "second half")
Results = Mapping[tuple[str, int, str], np.ndarray]


@torch.no_grad()
def token_nats(model: Any, ids: Tensor) -> Tensor:
    """Computes the nats of each token except the first, given earlier tokens, `[L - 1]` in float64."""
    states: list[Tensor] = []
    head = model.get_output_embeddings()

    def only_last(module: Any, given: tuple[Tensor]) -> Tensor:
        states.extend(given)
        return given[0][:, -1:]

    with contextlib.ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(only_last).remove)
        last = model(input_ids=ids, use_cache=False).logits
    hidden = states[0] if states else None
    if hidden is None or not torch.allclose(head(hidden[:, -1:]), last[:, -1:], rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"expected logits that are the output layer of the last hidden states, but {type(model).__name__} changes "
            "them afterwards: such models cannot be measured here"
        )
    found = []
    for start in range(0, ids.shape[1] - 1, SLICE):
        targets = ids[0, 1:][start : start + SLICE]
        logits = head(hidden[0, start : start + len(targets)])
        found.append(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
    return torch.cat(found).double().cpu()


def measure(model: Any, tokenizer: Any, arguments: argparse.Namespace, called: str) -> Results:
    """Computes the mean nats of every sample, whole and second half, `[samples, 2]` by text, length and variant."""
    found: dict[tuple[str, int, str], list[list[float]]] = {}

    def pieces() -> Iterator[tuple[dict[str, str], tuple[str, int, Tensor, shared.Variant]]]:
        for path, length in itertools.product(arguments.texts, arguments.lengths):
            rows = samples(path, tokenizer, length, arguments.samples, arguments.seed).split(1)
            # Neighbours, which several processes measure at a time, take about as long.
            for variant, (number, ids) in itertools.product(arguments.variants, enumerate(rows)):
                digest = hashlib.sha256(repr(ids.tolist()).encode()).hexdigest()[:12]
                of = {"model": called, "sample": digest, "variant": variant.label}
                yield of, (Path(path).name, number, ids, variant)

    def nats_of(piece: tuple[str, int, Tensor, shared.Variant]) -> dict[str, Any]:
        *_, ids, variant = piece
        variant.apply(model)
        nats = token_nats(model, ids.to(model.device))
        return {"nats": [float(nats.mean()), float(nats[ids.shape[1] // 2 - 1 :].mean())]}

    for (text, number, ids, variant), result, is_new in shared.measured(arguments.records, pieces(), nats_of):
        length = ids.shape[1]
        if is_new:
            shown = f"{length} tokens, sample {number}, {variant.label}"
            processes().print(f"{text}, {shown}: {result['nats'][0]:.4f} nats", flush=True)
        found.setdefault((text, length, variant.label), []).append(result["nats"])
    return {key: np.array(rows) for key, rows in found.items()}


def difference(nats: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Computes by what fraction perplexity is greater than with exact attention, and its standard error."""
    paired = nats - exact
    share = math.expm1(paired.mean())
    error = paired.std(ddof=1) / math.sqrt(len(paired)) if len(paired) > 1 else math.nan
    return share, (1 + share) * error


def cells_of(results: Results, exact: str) -> list[dict[str, Any]]:
    """Computes perplexity and difference from exact attention for every text, length and variant."""
    cells = []
    for (text, length, variant), nats in results.items():
        cell: dict[str, Any] = {"text": text, "length": length, "variant": variant, "samples": len(nats)}
        for column, part in enumerate(PARTS):
            share, error = difference(nats[:, column], results[text, length, exact][:, column])
            cell[part] = {"perplexity": math.exp(nats[:, column].mean()), "difference": share, "error": error}
        cells.append({**cell, "nats": nats.tolist()})
    return cells


def report_lines(cells: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> list[str]:
    """Writes the Markdown report, with one table per text."""
    lines = [
        "# Perplexity on long texts",
        "",
        f"Model {context['model']}, float32, one pass over each sample. In brackets: how much greater than with exact "
        "attention, and the standard error of that, paired by sample. Less is better.",
    ]
    header = ["attention", "tokens", "samples", *(f"{part}, perplexity" for part in PARTS)]
    for text in dict.fromkeys(cell["text"] for cell in cells):
        rows = []
        for cell in (cell for cell in cells if cell["text"] == text):
            row = [f"`{cell['variant']}`", str(cell["length"]), str(cell["samples"])]
            for part in (cell[name] for name in PARTS):
                change = f" ({100 * part['difference']:+.2f} ± {100 * part['error']:.2f} %)"
                row.append(f"{part['perplexity']:.2f}" + (change if cell["variant"] != context["variants"][0] else ""))
            rows.append(row)
        lines += ["", f"## {text}", "", *report.table(header, rows)]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    arguments = parse_arguments(argv)
    model, tokenizer = load(arguments.model, arguments.device)
    context = shared.context(NAME, argv, arguments)
    cells = cells_of(measure(model, tokenizer, arguments, context["model"]), context["variants"][0])
    return report.finish(arguments, report_lines(cells, context), {**context, "cells": cells})


cli = shared_program(NAME, main)


if __name__ == "__main__":
    cli()
