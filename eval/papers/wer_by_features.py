r"""Errors of speech recognition against the number of random features: Fig. 4 of the FAVOR# paper.

    python -m favor.eval.papers.wer_by_features --model_name_or_path out/asr --data_dir LibriSpeech \
        --train_split train-clean-100 --eval_splits dev-clean test-clean --max_train_steps 1000 \
        --output_dir out/wer --name small --seeds 0 1

An arm is one attention: exact (sdpa), the mean of the values over time (uniform_mean), or a FAVOR backend with features
and their number M, always with `exact_below` 0. With `--model_name_or_path` every arm, also the exact one, starts from
that model, which was trained with exact attention: it is converted and evaluated, then fine-tuned and evaluated again.
Without this option every arm is trained from new weights. Arguments that are not listed here go to `favor.train.asr`.
Each arm and seed has a process and a folder of its own below `--output_dir`. If the program is started again, it skips
finished runs. The report covers all finished arms of the folder, so that several processes may share the arms.

Source: Likhosherstov et al. 2023, "FAVOR#", section 5.3.1: normalised WER for M = 8, 32 and 128.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from favor.eval import asr as evaluation
from favor.eval.approximation.variants import mean_of_values
from favor.eval.common import launch, report
from favor.eval.common.launch import Backend
from favor.eval.glue.table import DASH
from favor.eval.papers.common import panels, save
from favor.integrations.adapt.observe import Observation
from favor.integrations.masks import favor_mask, refuse, visibility
from favor.train import asr
from favor.train.common import checkpoint
from favor.train.common.lock import hold, releases_locks
from favor.train.common.program import Parser, program
from favor.train.speech.arguments import HUB, Arguments
from favor.train.speech.data import long_enough
from favor.train.speech.model import make_model, make_processor
from favor.train.speech.sources import load_speech
from favor_command.program import in_new_words

RECORD = "arm.json"
EXACT, UNIFORM = "sdpa", "uniform_mean"
NAMES = {EXACT: "exact", UNIFORM: "mean over time"}
STAGES = {"converted": "As converted, without training", "trained": "After training"}
METRICS = ("wer", "cer")
COSTS = ("steps", "seconds_per_step", "wall_seconds", "peak_memory_bytes", "parameters")
DEFAULT_ARMS = (EXACT, UNIFORM, "favor++", "favor#:sderf", "favor#:wderf")
OWN = (
    *("attn_implementation", "num_features", "features", "factorization", "window", "statistics", "exact_below"),
    *("redraw_interval", "seed", "resume", "overwrite_output_dir"),
)
# A converted model is evaluated before training, so its architecture must be that of the saved model.
OF_THE_MODEL = ("architecture", "ctc_weight")

Run = dict[str, Any]
Row = dict[str, Any]


def parse_arms(text: str, counts: Sequence[int]) -> list[Backend]:
    """Reads the arms of a word: a FAVOR backend without a number gives one arm for each of `counts`."""
    arm = Backend(UNIFORM) if text == UNIFORM else Backend.parse(text)
    if arm.name in (UNIFORM, EXACT, "eager"):
        return [arm]
    if arm.features and arm.name not in ("favor#", "favor_sharp"):
        raise ValueError(f"features are those of favor#, got {text!r}; write {arm.name!r}")
    chosen = counts if arm.num_features is None else [arm.num_features]
    if min(chosen) < 1:
        raise ValueError(f"the number of features must be at least 1, got {min(chosen)} for {text!r}")
    return [replace(arm, num_features=count) for count in chosen]


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments of the evaluation; returns them and the rest, which goes to `favor.train.asr`."""
    parser = Parser("favor.eval.papers.wer_by_features", __doc__)
    add = parser.add_argument
    add("--model_name_or_path", help="model trained with exact attention; default: new weights")
    add("--backends", nargs="+", default=list(DEFAULT_ARMS), metavar="NAME[:FEATURES][:M]", help="arms to compare")
    add("--num_features", nargs="+", type=int, default=[8, 32, 128], metavar="M", help="for FAVOR arms that name none")
    add("--seeds", nargs="+", type=int, default=[0], help="seeds of the runs")
    add("--output_dir", type=Path, required=True, help="folder that gets a folder per arm and seed")
    add("--results_dir", type=Path, default=Path("out/results"), help="folder of the report")
    add("--name", required=True, help="the files of the report are called wer_by_features_NAME")
    add("--report_only", action="store_true", help="report on finished runs, and run nothing")
    arguments, rest = parser.parse_known_args(argv)
    rest = [word for word in rest if word != "--"]
    own = {*OWN, *(OF_THE_MODEL if arguments.model_name_or_path else ())}
    for word in rest:
        if word.startswith("--") and word[2:].split("=")[0] in own:
            raise ValueError(f"{word} is set by the program, or would differ between arms; use --backends, --seeds")
    parser.check_passed_on(rest, Arguments.parser())
    if arguments.report_only and rest:
        raise ValueError(f"with --report_only nothing is trained, so {shlex.join(rest)} has no effect: leave it out")
    found = [arm for text in arguments.backends for arm in parse_arms(text, arguments.num_features)]
    arguments.backends, arguments.seeds = list(dict.fromkeys(found)), list(dict.fromkeys(arguments.seeds))
    return arguments, rest


def uniform_mean_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the attention "uniform_mean": every query gets the mean of the values `[B, Hk, S, dv]` that it may see.

    Only the shapes of queries and keys matter; padded frames do not count, and dropout leaves out values, as in the
    FAVOR backends. Arguments and returns are those of transformers' attention functions.
    """
    refuse(kwargs, module)
    sees = visibility(module, attention_mask, is_causal, (query.shape[0], query.shape[2], key.shape[2]))
    if dropout > 0:
        value = value * nn.functional.dropout(value.new_ones(*value.shape[:-1], 1), dropout)
    seen = Observation(0, module, query, key, value, sees.padding, sees.causal, 1.0, output=value)
    return mean_of_values(seen).transpose(1, 2).contiguous(), None


def register_uniform_mean() -> None:
    """Registers "uniform_mean" with transformers, in this process."""
    AttentionInterface.register(UNIFORM, uniform_mean_forward)
    AttentionMaskInterface.register(UNIFORM, favor_mask)


def training_words(arm: Backend) -> list[str]:
    """Writes an arm as arguments of `favor.train.asr`; an estimator runs for short audio too, not exact attention."""
    return [*arm.arguments(), *([] if arm.num_features is None else ["--exact_below", "0"])]


def evaluate_converted(words: Sequence[str], seed: int) -> dict[str, float]:
    """Measures error rates in percent of a run's model before its training, `{split}_wer` and `{split}_cer`."""
    arguments = Arguments.parse(list(words))
    data, folder = arguments.data, Path(arguments.train.output_dir)
    processor = make_processor(arguments, ())
    model = make_model(arguments, processor, seed).to(PartialState().device)
    scores = {}
    for split in data.eval_splits:
        prepared = folder / "prepared" / split
        utterances, skipped = load_speech(data.data_dir or HUB, split, prepared=prepared, max_bad=data.limit)
        utterances = long_enough(utterances[: data.max_eval_samples], processor, skipped)
        seconds = arguments.train.per_device_train_batch_seconds
        texts, _ = evaluation.recognise(model, processor, utterances, batch_seconds=seconds)
        pairs = list(zip((utterance.text for utterance in utterances), texts, strict=True))
        scores.update({f"{split}_{name}": value for name, value in asr.errors(pairs).items()})
    return scores


def train(words: Sequence[str]) -> float:
    """Runs `favor.train.asr` once; returns its seconds."""
    register_uniform_mean()
    start = time.perf_counter()
    asr.main(list(words))
    return time.perf_counter() - start


def in_own_process(function: Callable[[Sequence[str]], float], words: Sequence[str]) -> float:
    """Calls a function in a new process, so that the peak of its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, words).result()


def run_arm(arm: Backend, seed: int, arguments: argparse.Namespace, common: Sequence[str]) -> bool:
    """Runs the unfinished parts of an arm, with the arguments that all share; returns whether there were any."""
    folder = arguments.output_dir / arm.slug / f"seed_{seed}"
    place, results = folder / RECORD, folder / checkpoint.RESULTS
    record: dict[str, Any] = {"arm": arm.label, "backend": replace(arm, num_features=None).label, "seed": seed}
    record |= {"num_features": arm.num_features, "arguments": list(common)}
    record["machine"] = f"{launch.machine()}, {torch.get_num_threads()} threads"
    record |= json.loads(place.read_text()) if place.exists() else {}
    converts = arguments.model_name_or_path is not None and "converted" not in record
    if results.exists() and not converts:
        return False
    words = [*common, *training_words(arm), "--seed", str(seed), "--output_dir", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(place, record)
    if converts:
        record["converted"] = evaluate_converted(words, seed)
        checkpoint.write_json(place, record)
    if not results.exists():
        again = ["--resume"] if checkpoint.checkpoints(folder) else []
        seconds = in_own_process(train, [*words, *again])
        # The seconds of a training that was interrupted are not known.
        record["wall_seconds"] = None if again else seconds
        checkpoint.write_json(place, record)
    return True


def records(folder: Path, arguments: Sequence[str] | None = None) -> dict[Path, Run]:
    """Reads the records of all started arms and seeds below a folder, by their own folders."""
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
        if (place / checkpoint.RESULTS).exists():
            results = json.loads((place / checkpoint.RESULTS).read_text())
            scores = {stage: own for stage in STAGES if (own := {**record, "trained": results["metrics"]}.get(stage))}
            kept = {name: results[name] for name in ("hours", "utterances", "versions", "device")}
            costs = {name: {**record, **results}.get(name) for name in COSTS}
            splits = results["arguments"]["eval_splits"]
            runs.append({**record, **kept, **costs, "scores": scores, "splits": splits})
    return runs


def normalised(run: Run, runs: Sequence[Run], stage: str, metric: str) -> float | None:
    """Divides an error rate by that of exact attention with the same seed and stage; None if that is missing or 0."""
    exact = [other for other in runs if other["backend"] == EXACT and other["seed"] == run["seed"]]
    reference = exact[0]["scores"][stage][metric] if exact else 0
    return run["scores"][stage][metric] / reference if reference else None


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Computes mean and sample standard deviation of the known values, None for too few; also gives all values."""
    known = [value for value in values if value is not None]
    deviation = statistics.stdev(known) if len(known) > 1 else None
    return {"mean": statistics.fmean(known) if known else None, "std": deviation, "values": list(values)}


def summarise(runs: Sequence[Run]) -> list[Row]:
    """Makes one row per arm: exact attention, the mean over time, then the backends by name and number of features.

    `scores[stage][metric]` and `normalised[stage][metric]` of a row are each a `spread` over the seeds; costs are
    medians over the seeds, for memory the greatest.
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
            row["scores"][stage], row["normalised"][stage] = {}, {}
            for name in own[0]["scores"][stage]:
                row["scores"][stage][name] = spread([run["scores"][stage][name] for run in own])
                row["normalised"][stage][name] = spread([normalised(run, runs, stage, name) for run in own])
        for cost in COSTS:
            known = [run[cost] for run in own if run[cost] is not None]
            middle = max if cost == "peak_memory_bytes" else statistics.median
            row[cost] = middle(known) if known else None
        rows.append(row)
    return rows


def checks(rows: Sequence[Row], splits: Sequence[str]) -> list[report.Check]:
    """Checks that, once trained, FAVOR# is no worse than FAVOR++ at any M, and all backends beat the mean over time."""
    found = []
    sharp = [name for name in dict.fromkeys(row["backend"] for row in rows) if name.startswith("favor#")]
    for split, metric in itertools.product(splits, METRICS):
        shown, name = f"{split}, {metric.upper()} after training", f"{split}_{metric}"
        of = {(r["backend"], r["num_features"]): r["scores"]["trained"][name]["mean"] for r in rows}
        for backend in sharp:
            counts = [count for other, count in of if other == backend and ("favor++", count) in of]
            if counts:
                pairs = {count: (of[backend, count], of["favor++", count]) for count in counts}
                numbers = "; ".join(f"M = {m}: {ours:.2f} and {theirs:.2f}" for m, (ours, theirs) in pairs.items())
                holds = all(ours <= theirs for ours, theirs in pairs.values())
                found.append(report.Check(f"{shown}: {backend} is at most favor++ at every M", numbers, holds))
        linear = {key: value for key, value in of.items() if key[1] is not None}
        if (UNIFORM, None) in of and linear:
            worst, mean = max(linear, key=linear.__getitem__), of[UNIFORM, None]
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
    columns = [(metric, kind, digits) for metric in METRICS for kind, digits in (("scores", 2), ("normalised", 3))]
    lines: list[str] = []
    for stage, title in STAGES.items():
        there = [row for row in rows if stage in row["scores"]]
        for split in splits if there else ():
            cells = [
                [*_name(row), *(_shown(row[kind][stage][f"{split}_{metric}"], d) for metric, kind, d in columns)]
                for row in there
            ]
            lines += ["", f"## {title}: {split}", "", *report.table(header, cells)]
    return lines


def cost_lines(rows: Sequence[Row]) -> list[str]:
    """Writes the table of the costs of the training of each arm."""
    shown = {"seconds_per_step": (1, ".3f"), "peak_memory_bytes": (2**20, ".0f")}
    cells = []
    for row in rows:
        of = [(row[cost], *shown.get(cost, (1, ".0f"))) for cost in COSTS]
        cells.append(
            [*_name(row), *(DASH if value is None else format(value / unit, form) for value, unit, form in of)]
        )
    return report.table(["attention", "M", "steps", "s/step", "seconds", "peak MiB", "parameters"], cells)


def report_lines(rows: Sequence[Row], runs: Sequence[Run], words: Sequence[str]) -> list[str]:
    """Writes the Markdown report of all runs, which share these arguments."""
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
    """Writes `wer_by_features_{name}` .md, .json and .png for all finished arms of a folder; gives the report."""
    runs = read(folder)
    if not runs:
        raise ValueError(f"expected finished arms below {folder}, found none: start without --report_only first")
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
    """Draws normalised error rates against M: a row of panels per stage, a column per split and metric."""
    stages = [stage for stage in STAGES if any(stage in row["normalised"] for row in rows)]
    columns = [(split, metric) for split in splits for metric in METRICS]
    figure, grid = panels(len(stages), len(columns), 3.6, 3.2)
    for axes, (stage, (split, metric)) in zip(grid.flat, itertools.product(stages, columns), strict=True):
        _panel(axes, rows, stage, f"{split}_{metric}")
        axes.set_title(f"{STAGES[stage].split(',')[0]}: {split}", fontsize=9)
        axes.set(ylabel=f"normalised {metric.upper()}", xlabel="random features M")
    save(figure, path, grid[0][0])


def _panel(axes: Any, rows: Sequence[Row], stage: str, name: str) -> None:
    lines: dict[str, list[tuple[int, float, float]]] = {}  # by backend: M, mean and deviation
    for row in (row for row in rows if stage in row["normalised"]):
        value, backend = row["normalised"][stage][name], row["backend"]
        if value["mean"] is not None and row["num_features"] is None:
            line = "--" if backend == UNIFORM else "-"
            axes.axhline(value["mean"], color="black", linestyle=line, label=NAMES.get(backend, backend))
        elif value["mean"] is not None:
            lines.setdefault(backend, []).append((row["num_features"], value["mean"], value["std"] or 0.0))
    for backend, points in lines.items():
        counts, means, deviations = zip(*points, strict=True)
        axes.errorbar(counts, means, yerr=deviations, marker="o", capsize=2, label=backend)
    axes.set_xscale("log", base=2)
    ticks = sorted({point[0] for points in lines.values() for point in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def run_all(arguments: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Runs the unfinished arms, seed by seed, and reports after each run; returns the names of failed runs."""
    hold(arguments.output_dir)
    register_uniform_mean()
    common = list(rest)
    if arguments.model_name_or_path is not None:
        evaluation.speech_config(arguments.model_name_or_path)
        common = ["--model_name_or_path", arguments.model_name_or_path, *rest]
    records(arguments.output_dir, common)
    for arm in arguments.backends:
        Arguments.parse([*common, *training_words(arm), "--output_dir", str(arguments.output_dir)])
    failures = []
    cells = [(seed, arm) for seed in arguments.seeds for arm in arguments.backends]
    for number, (seed, arm) in enumerate(cells, 1):
        name = f"[{number}/{len(cells)}] {arm.label} seed {seed}"
        try:
            ran = run_arm(arm, seed, arguments, common)
        except (FloatingPointError, BrokenProcessPool) as error:
            failures.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        print(f"{name}: {'finished' if ran else 'was finished before'}", flush=True)
        if ran and number < len(cells):
            write(arguments.output_dir, arguments.results_dir, arguments.name)
    return failures


@releases_locks
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if an arm failed."""
    arguments, rest = parse_arguments(sys.argv[1:] if argv is None else argv)
    failures = [] if arguments.report_only else run_all(arguments, rest)
    if arguments.report_only or read(arguments.output_dir):
        print("\n".join(write(arguments.output_dir, arguments.results_dir, arguments.name)))
    if failures:
        print("failed: " + "; ".join(failures), file=sys.stderr)
    return 1 if failures else 0


cli = program("favor.eval.papers.wer_by_features", main)


if __name__ == "__main__":
    cli()
