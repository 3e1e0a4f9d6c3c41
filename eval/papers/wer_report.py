"""Table, checks and figure of `favor.eval.papers.wer_by_features`, from the folders of finished arms."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor.eval.common import report
from favor.eval.glue.table import DASH
from favor.train.common.checkpoint import RESULTS
from favor_command.program import in_new_words

RECORD = "arm.json"
EXACT, UNIFORM = "sdpa", "uniform_mean"
NAMES = {EXACT: "exact", UNIFORM: "mean over time"}
STAGES = {"converted": "As converted, without training", "trained": "After training"}
METRICS = ("wer", "cer")
COSTS = ("steps", "seconds_per_step", "wall_seconds", "peak_memory_bytes", "parameters")

Run = dict[str, Any]
Row = dict[str, Any]


def records(folder: Path, arguments: Sequence[str] | None = None) -> dict[Path, Run]:
    """Reads the records of all started arms and seeds below a folder, by their own folders.

    Args:
        folder: output folder of the arms.
        arguments: the arguments that all arms must have. Default None: those of the first arm.

    Raises:
        ValueError: if the arms cannot be compared, because their arguments differ.
    """
    found = {place.parent: json.loads(place.read_text()) for place in sorted(folder.glob(f"*/seed_*/{RECORD}"))}
    for place, record in found.items():
        arguments = record["arguments"] if arguments is None else list(arguments)
        if in_new_words(record["arguments"], arguments) != in_new_words(arguments, record["arguments"]):
            raise ValueError(
                f"{place} has other arguments than the other folders or this run:\n"
                f"  there {shlex.join(record['arguments'])}\n  here  {shlex.join(arguments)}\n"
                "choose another --output_dir, or remove that folder to run it again"
            )
    return found


def read(folder: Path) -> list[Run]:
    """Reads every finished arm and seed below a folder: its record with the scores and costs of its training."""
    runs = []
    for place, record in records(folder).items():
        if (place / RESULTS).exists():
            results = json.loads((place / RESULTS).read_text())
            scores = {"trained": results["metrics"]}
            scores |= {"converted": record["converted"]} if "converted" in record else {}
            kept = {name: results[name] for name in ("hours", "utterances", "versions", "device")}
            splits = results["arguments"]["eval_splits"]
            costs = {name: {**record, **results}.get(name) for name in COSTS}
            runs.append({**record, **kept, **costs, "scores": scores, "splits": splits})
    return runs


def normalised(run: Run, runs: Sequence[Run], stage: str, metric: str) -> float | None:
    """Divides an error rate by that of exact attention with the same seed and stage; None if that is missing or 0.

    Args:
        run: the run.
        runs: all runs.
        stage: a key of STAGES.
        metric: name of the error rate.
    """
    exact = [other for other in runs if other["backend"] == EXACT and other["seed"] == run["seed"]]
    reference = exact[0]["scores"][stage][metric] if exact else 0
    return run["scores"][stage][metric] / reference if reference else None


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Computes mean and sample standard deviation of the known values, None for too few; also gives all values."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "values": list(values),
    }


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Makes one row per arm: exact attention, the mean over time, then the backends by name and number of features.

    Returns:
        Rows with `scores[stage][metric]` and `normalised[stage][metric]`, each a `spread` over the seeds, and the
        costs: medians over the seeds, for memory the greatest.
    """

    def rank(run: Run) -> tuple[int, str, int]:
        firsts = [*NAMES, "favor+", "favor++"]
        place = firsts.index(run["backend"]) if run["backend"] in firsts else len(firsts)
        return place, run["backend"], run["num_features"] or 0

    rows = []
    for arm in dict.fromkeys(run["arm"] for run in sorted(runs, key=rank)):
        own = sorted((run for run in runs if run["arm"] == arm), key=lambda run: run["seed"])
        row: Row = {name: own[0][name] for name in ("arm", "backend", "num_features")}
        row |= {"seeds": [run["seed"] for run in own], "scores": {}, "normalised": {}}
        for stage in (stage for stage in STAGES if stage in own[0]["scores"]):
            metrics = own[0]["scores"][stage]
            row["scores"][stage] = {name: spread([run["scores"][stage][name] for run in own]) for name in metrics}
            row["normalised"][stage] = {
                name: spread([normalised(run, runs, stage, name) for run in own]) for name in metrics
            }
        for cost in COSTS:
            known = [run[cost] for run in own if run[cost] is not None]
            middle = max if cost == "peak_memory_bytes" else statistics.median
            row[cost] = middle(known) if known else None
        rows.append(row)
    return rows


def checks(rows: Sequence[Row], splits: Sequence[str]) -> list[report.Check]:
    """Checks that, once trained, FAVOR# is no worse than FAVOR++ at any M, and all backends beat the mean over time."""
    found = []
    values = {
        (row["backend"], row["num_features"]): {name: of["mean"] for name, of in row["scores"]["trained"].items()}
        for row in rows
    }
    sharp = [name for name in dict.fromkeys(row["backend"] for row in rows) if name.startswith("favor#")]
    for split in splits:
        for metric in METRICS:
            name, shown = f"{split}_{metric}", f"{split}, {metric.upper()} after training"
            for backend in sharp:
                counts = [count for other, count in values if other == backend and ("favor++", count) in values]
                pairs = [(count, values[backend, count][name], values["favor++", count][name]) for count in counts]
                if pairs:
                    numbers = "; ".join(f"M = {count}: {ours:.2f} and {theirs:.2f}" for count, ours, theirs in pairs)
                    holds = all(ours <= theirs for _, ours, theirs in pairs)
                    found.append(report.Check(f"{shown}: {backend} is at most favor++ at every M", numbers, holds))
            linear = {key: of[name] for key, of in values.items() if key[1] is not None}
            if (UNIFORM, None) in values and linear:
                worst, mean = max(linear, key=lambda key: linear[key]), values[UNIFORM, None][name]
                numbers = f"{worst[0]} with M = {worst[1]}: {linear[worst]:.2f}, mean over time {mean:.2f}"
                holds = linear[worst] < mean
                found.append(report.Check(f"{shown}: every backend is below the mean over time", numbers, holds))
    return found


def _shown(value: Row, digits: int) -> str:
    if value["mean"] is None:
        return DASH
    deviation = "" if value["std"] is None else f" ± {value['std']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{deviation}"


def _name(row: Row) -> list[str]:
    name = NAMES.get(row["backend"])
    return [name or f"`{row['backend']}`", DASH if row["num_features"] is None else str(row["num_features"])]


def score_lines(rows: Sequence[Row], splits: Sequence[str]) -> list[str]:
    """Writes one table per stage and split: error rates in percent, and divided by those of exact attention."""
    header = ["attention", "M", "WER %", "normalised WER", "CER %", "normalised CER"]
    lines: list[str] = []
    for stage, title in STAGES.items():
        there = [row for row in rows if stage in row["scores"]]
        for split in splits if there else ():
            cells = [
                [
                    *_name(row),
                    *(
                        _shown(row[kind][stage][f"{split}_{metric}"], digits)
                        for metric in METRICS
                        for kind, digits in (("scores", 2), ("normalised", 3))
                    ),
                ]
                for row in there
            ]
            lines += ["", f"## {title}: {split}", "", *report.table(header, cells)]
    return lines


def cost_lines(rows: Sequence[Row]) -> list[str]:
    """Writes the table of the costs of the training of each arm."""

    def number(value: float | None, form: str, unit: float = 1.0) -> str:
        return DASH if value is None else format(value / unit, form)

    cells = [
        [
            *_name(row),
            number(row["steps"], ".0f"),
            number(row["seconds_per_step"], ".3f"),
            number(row["wall_seconds"], ".0f"),
            number(row["peak_memory_bytes"], ".0f", 2**20),
            number(row["parameters"], ".0f"),
        ]
        for row in rows
    ]
    return report.table(["attention", "M", "steps", "s/step", "seconds", "peak MiB", "parameters"], cells)


def report_lines(rows: Sequence[Row], runs: Sequence[Run], words: Sequence[str]) -> list[str]:
    """Writes the Markdown report.

    Args:
        rows: one per arm.
        runs: all runs.
        words: the arguments that all arms share.
    """
    splits, first = runs[0]["splits"], runs[0]
    seeds = [str(seed) for seed in sorted({run["seed"] for run in runs})]
    starts = "--model_name_or_path" in words
    model = Path(words[words.index("--model_name_or_path") + 1]).name if starts else ""
    text = f"fine-tuned from {model}" if starts else "trained from new weights"
    data = ", ".join(f"{name} {hours:.2f} h ({first['utterances'][name]})" for name, hours in first["hours"].items())
    return [
        "# Errors of speech recognition against the number of random features",
        "",
        f"- Every arm with the same recipe, {text}; FAVOR arms with `exact_below` 0",
        f"- Hours of audio (utterances): {data}",
        f"- Seeds: {', '.join(seeds)}; mean ± sample standard deviation where there are several",
        "- Greedy search. Normalised: over the score of exact attention with the same seed, evaluated in the same way",
        "- Mean over time: every frame gets the mean of the values of the utterance, whatever its query",
        *score_lines(rows, splits),
        "",
        "## Cost of the training",
        "",
        *cost_lines(rows),
        "",
        "Medians over steps and seeds, the greatest memory: allocated on a GPU, or resident in the arm's process on a",
        "CPU. Seconds include loading, decoding of the audio and evaluations. The mean over time is computed with the",
        "L x L matrix, so its times say nothing.",
    ]


def write(folder: Path, results: Path, name: str) -> list[str]:
    """Writes `wer_by_features_{name}` .md, .json and .png for all finished arms of a folder.

    Args:
        folder: output folder of the arms.
        results: folder of the files.
        name: name of the report.

    Returns:
        The lines of the Markdown report.

    Raises:
        ValueError: if no arm is finished, or two arms had different arguments.
    """
    runs = read(folder)
    if not runs:
        raise ValueError(
            f"expected finished arms below {folder}, found none: run favor.eval.papers.wer_by_features first"
        )
    rows, splits, common = summarise(runs), runs[0]["splits"], runs[0]["arguments"]
    arms = [row["arm"] for row in rows]
    seeds = [str(seed) for seed in sorted({run["seed"] for run in runs})]
    words = [*common, "--backends", *arms, "--seeds", *seeds, "--name", name, "--output_dir", "OUT"]
    lines, found = report_lines(rows, runs, common), checks(rows, splits)
    content = {
        "command": report.shown_command("favor.eval.papers.wer_by_features", report.local_names(words), ["--data_dir"]),
        "machine": "; ".join(sorted({run["machine"] for run in runs})),
        "versions": runs[0]["versions"],
        "splits": splits,
        **{kind: runs[0][kind] for kind in ("hours", "utterances", "device")},
        "rows": rows,
    }
    report.write(results, f"wer_by_features_{name}", lines, content, found)
    plot(rows, splits, results / f"wer_by_features_{name}.png")
    return [*lines, "", *(check.line() for check in found)]


def plot(rows: Sequence[Row], splits: Sequence[str], path: Path) -> None:
    """Draws normalised error rates against M: a row of panels per stage, a column per split and metric.

    Args:
        rows: one per arm.
        splits: the evaluation splits.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages = [stage for stage in STAGES if any(stage in row["normalised"] for row in rows)]
    columns = [(split, metric) for split in splits for metric in METRICS]
    size = (3.6 * len(columns), 3.2 * len(stages))
    figure, grid = plt.subplots(len(stages), len(columns), figsize=size, squeeze=False, layout="constrained")
    for axes_row, stage in zip(grid, stages, strict=True):
        for axes, (split, metric) in zip(axes_row, columns, strict=True):
            _panel(axes, rows, stage, f"{split}_{metric}")
            axes.set_title(f"{STAGES[stage].split(',')[0]}: {split}", fontsize=9)
            axes.set_ylabel(f"normalised {metric.upper()}")
    if grid[0][0].get_legend_handles_labels()[0]:
        grid[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Any, rows: Sequence[Row], stage: str, name: str) -> None:
    there = [(row, row["normalised"][stage][name]) for row in rows if stage in row["normalised"]]
    known = [(row["backend"], row["num_features"], value) for row, value in there if value["mean"] is not None]
    for backend, count, value in known:
        if count is None:
            line = "--" if backend == UNIFORM else "-"
            axes.axhline(value["mean"], color="black", linestyle=line, label=NAMES.get(backend, backend))
    linear = [entry for entry in known if entry[1] is not None]
    for place, backend in enumerate(dict.fromkeys(entry[0] for entry in linear)):
        points = [(count, value["mean"], value["std"] or 0.0) for other, count, value in linear if other == backend]
        counts, means, deviations = zip(*points, strict=True)
        axes.errorbar(counts, means, yerr=deviations, marker="o", capsize=2, color=f"C{place}", label=backend)
    axes.set_xscale("log", base=2)
    ticks = sorted({count for _, count, _ in linear})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("random features M")
    axes.grid(alpha=0.3)
