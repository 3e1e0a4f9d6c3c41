"""Table and picture of `favor.eval.whisper`: word error rates, their intervals, and the errors of the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from favor.eval.approximation.variants import Variant
from favor.eval.common import report
from favor.train.speech.word_errors import ErrorCounts

Row = dict[str, Any]


def interval(errors: Sequence[int], words: Sequence[int], speakers: Sequence[str], seed: int = 0) -> list[float]:
    """Computes the 95 % bootstrap interval of sum(errors) / sum(words), drawing speakers; NaN for one speaker."""
    own = sorted(set(speakers))
    if len(own) < 2:
        return [float("nan")] * 2
    places = np.array([own.index(speaker) for speaker in speakers])
    totals = [np.bincount(places, np.asarray(numbers, float), len(own)) for numbers in (errors, words)]

    options = {"paired": True, "vectorized": True, "method": "percentile", "rng": np.random.default_rng(seed)}
    found = stats.bootstrap(totals, lambda errors, words, axis=-1: errors.sum(axis) / words.sum(axis), **options)
    return [float(found.confidence_interval.low), float(found.confidence_interval.high)]


def row(
    variant: Variant | None,
    edits: Mapping[str, Any],
    exact: Sequence[int],
    words: Sequence[int],
    speakers: Sequence[str],
    heads: Sequence[float] = (),
) -> Row:
    """Makes a row of the table: error rates as fractions, with their intervals, and the errors of each piece."""
    errors = edits["errors_of_pieces"]
    difference = [own - other for own, other in zip(errors, exact, strict=True)]
    return {
        "attention": variant.label if variant else "exact",
        "num_features": variant and variant.num_features,
        "window": variant and variant.window,
        "options": dict(variant.more) if variant else {},
        "wer": sum(errors) / sum(words),
        "interval": interval(errors, words, speakers),
        "difference": sum(difference) / sum(words),
        "difference_interval": interval(difference, words, speakers),
        "head_errors": list(heads),
        **edits,
    }


def edits_of(counts: Sequence[ErrorCounts]) -> Row:
    """Gives the part of a row that was counted: edits of all pieces, and the errors of each."""
    return {**asdict(sum(counts, ErrorCounts())), "errors_of_pieces": [each.errors for each in counts]}


def lines(rows: Sequence[Row], facts: str) -> list[str]:
    """Writes the report in Markdown, exact attention first."""

    def ends(pair: Sequence[float]) -> str:
        return f"{100 * pair[0]:.2f} to {100 * pair[1]:.2f}"

    head = ["attention of the encoder", "M", "window", "WER, %", "95 %", "minus exact, points", "95 %"]
    body = []
    for each in rows:
        cells = [str(each["num_features"] or "-"), str(each["window"] or "-")]
        cells += [f"{100 * each['wer']:.2f}", ends(each["interval"])]
        if each is rows[0]:
            body.append([each["attention"], *cells, "-", "-", "-", "-"])
            continue
        cells += [f"{100 * each['difference']:+.2f}", ends(each["difference_interval"])]
        errors = each["head_errors"]
        body.append([f"`{each['attention']}`", *cells, f"{np.mean(errors):.3f}", f"{np.quantile(errors, 0.9):.3f}"])
    head += ["mean head error", "p90"]
    return ["# Whisper with linear attention in its encoder, nothing trained", "", facts, "", *report.table(head, body)]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws word error rates over M, with intervals, and over the mean errors of heads; exact attention is first."""
    from matplotlib.figure import Figure  # only the picture needs it

    figure = Figure(figsize=(13, 4.8))
    left, right = figure.subplots(1, 2, sharey=True)
    exact, others = rows[0], rows[1:]
    every, ticks = [100 * row["wer"] for row in rows], [5, 10, 20, 50, 100]
    left.set(yscale="log", ylim=(max(0.7 * min(every), 0.1), 1.4 * max(*every, 0.2)), yticks=ticks, yticklabels=ticks)
    for axis in (left, right):
        axis.axhline(100 * exact["wer"], color="black", label="exact attention")
    names = list(dict.fromkeys(row["attention"] for row in others))
    for attention, window in dict.fromkeys((row["attention"], row["window"]) for row in others):
        own = [row for row in others if (row["attention"], row["window"]) == (attention, window)]
        own.sort(key=lambda row: row["num_features"])
        rates = [100 * row["wer"] for row in own]
        ends = np.abs(100 * np.array([row["interval"] for row in own]).T - rates)
        style = {"color": f"C{names.index(attention)}", "linestyle": "--" if window else "-", "marker": "o"}
        label = f"{attention}, window {window}" if window else attention
        left.errorbar([row["num_features"] for row in own], rates, yerr=ends, capsize=2, label=label, **style)
        right.plot([np.mean(row["head_errors"]) for row in own], rates, **(style | {"linestyle": ""}))
    marks = sorted({row["num_features"] for row in others})
    left.set(xscale="log", xlabel="M", ylabel="word error rate, %", xticks=marks, xticklabels=marks)
    left.minorticks_off()
    right.set(xlabel="mean relative error of the encoder's heads")
    right.legend(*left.get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
