r"""GLUE: a classifier with exact and linear attention, or trainings: tasks x backends x seeds.

    python -m favor.eval.glue --model_name_or_path DIR --task_name mrpc --data_dir DIR --exact_below auto 0

With `--task_name` the model is a classifier that was fine-tuned on this task, anywhere. Nothing is trained: its scores
with exact attention and with each backend stand side by side. Labels are ordered by their names.

    python -m favor.eval.glue --data_dir DIR --tasks mrpc rte --backends sdpa favor+ favor#:saderf \
        --seeds 0 1 2 --output_dir out/glue --results_dir out/results --exact_below 0 --num_train_epochs 3

Without it a table in the layout of the FAVOR# paper's Table 1 is made. Each (task, backend, seed) is one training run
of `favor.train.glue` in a process of its own, in a folder of its own below `--output_dir`. If the program is started
again, it skips finished runs. With `--checkpoints DIR` nothing is trained: every saved run below DIR (of the given
tasks, backends and seeds) is loaded again, evaluated, and compared with the measurements of its training. `--adapted`
adds models of `favor.train.distill` as rows. Unknown arguments are passed on to `favor.train.glue`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import transformers

from favor.eval.common import launch
from favor.eval.common.pretrained import MODULE, PACKAGE, SHA256, minilm_path
from favor.eval.common.report import write_files
from favor.eval.glue import adaptation, checkpoints, table
from favor.train.common.lock import hold, releases_locks
from favor.train.common.program import Parser, program
from favor.train.glue import Arguments

DEFAULT_BACKENDS = ("sdpa", "favor+", "favor++", "favor#")
TRAINING = ("tasks", "adapted", "seeds", "checkpoints", "task_options", "num_processes", "tolerance")
OWN_ARGUMENTS = ("--task_name", "--attn_implementation", "--features", "--seed")


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments of the evaluation; returns them and the rest, which goes to `favor.train.glue`.

    Raises:
        ValueError: if the rest sets an option that the evaluation varies itself.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser("favor.eval.glue", __doc__)
    tasks = [column.task for column in table.COLUMNS]
    parser.add_argument("--model_name_or_path", help=f"default: the MiniLM BERT in the package {PACKAGE}")
    parser.add_argument(
        "--data_dir", help="folder of GLUE in its official TSV layout; default: that of favor.train.glue"
    )
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks, metavar="TASK", help="tasks to run")
    parser.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME[:FEATURES][:M]",
        help=f"default: {' '.join(DEFAULT_BACKENDS)}, or none with --adapted; with --checkpoints: all; with "
        "--task_name: the one that the model was saved with, else landmark, and NAME:OPTION=VALUE,... is possible",
    )
    parser.add_argument(
        "--adapted",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folders of favor.train.distill: models that were adapted to their attention, each a row of its own",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0; with --checkpoints: all")
    parser.add_argument("--output_dir", type=Path, default=Path("out/glue"), help="folder that gets one folder per run")
    parser.add_argument(
        "--results_dir", type=Path, help="folder of glue.md, .json and .png; default: the output folder"
    )
    parser.add_argument("--name", help="file name of the results, without ending; default: glue, or glue_TASK")
    parser.add_argument(
        "--checkpoints", type=Path, help="evaluate the saved runs below this folder instead of training"
    )
    parser.add_argument(
        "--task_options",
        nargs="+",
        default=[],
        metavar="TASK:NAME=VALUE",
        help="training options of one task, for example cola:num_train_epochs=5; they replace common ones",
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, help="allowed difference of a reloaded run's metric (a fraction)"
    )
    parser.add_argument("--num_processes", type=int, default=1, help="processes (GPUs) of accelerate launch")
    parser.add_argument("--note", default="", help="a sentence for the head of the report")
    spelled = {word.partition("=")[0].replace("-", "_") for word in words}
    if spelled & {"__task_name", "__help", "_h"}:
        _add_classifier(parser)
    arguments, rest = parser.parse_known_args(words)
    arguments.command = words
    if "__task_name" in spelled:
        return _checked(parser, arguments, rest), []
    arguments.name = arguments.name or "glue"
    numbered = any(launch.Backend.parse(text).num_features for text in arguments.backends or ())
    own = (*OWN_ARGUMENTS, "--num_features") if numbered else OWN_ARGUMENTS
    given = [
        word.split("=")[0] for word in (*rest, *(f"--{text.partition(':')[2]}" for text in arguments.task_options))
    ]
    for word in given:
        if word in own:
            raise ValueError(f"{word} is set by favor.eval.glue itself; use --tasks, --backends or --seeds")
    parser.check_passed_on(given, Arguments.parser())
    if arguments.checkpoints:
        unused = [*rest, *arguments.task_options]
        if unused or arguments.model_name_or_path or arguments.adapted or arguments.num_processes != 1:
            raise ValueError(
                "with --checkpoints nothing is trained: --model_name_or_path, --adapted, --task_options, "
                "--num_processes and arguments of favor.train.glue have no effect, so leave them out; got "
                f"{shlex.join(unused) or 'one of the first four'}"
            )
    return arguments, rest


def _add_classifier(parser: Parser) -> None:
    """Adds the options of a classifier; without `--task_name` those that remain belong to `favor.train.glue`."""
    group = parser.add_argument_group("a classifier that was fine-tuned before")
    add = group.add_argument
    add(
        "--task_name",
        help="evaluate --model_name_or_path on its task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli",
    )
    add(
        "--exact_below",
        nargs="+",
        metavar="N",
        help="one row for each: backends run exact attention on fewer tokens than this; 0: never; auto (default): by "
        "speed",
    )
    add(
        "--label_names", nargs="+", metavar="NAME", help="names of the model's outputs, in order, if its own do not say"
    )
    add("--max_length", type=int, default=128, help="greatest number of tokens of a sample; the rest is cut off")
    add("--max_eval_samples", type=int, help="evaluate on this number of samples only, the first ones")
    add("--per_device_eval_batch_size", type=int, default=64, help="samples of a forward pass")
    add("--distractors", type=int, default=0, help="texts of other samples around the one that holds the answer")


def _checked(parser: Parser, arguments: argparse.Namespace, rest: list[str]) -> argparse.Namespace:
    """Checks the arguments for a classifier; raises ValueError."""
    used = [f"--{name}" for name in TRAINING if getattr(arguments, name) != parser.get_default(name)]
    if used:
        raise ValueError(
            f"with --task_name a classifier is evaluated and nothing is trained: {', '.join(used)} would have no "
            "effect, so leave it out"
        )
    parser.refuse(rest)
    if arguments.model_name_or_path is None:
        raise ValueError("--task_name evaluates a classifier: name it by --model_name_or_path")
    for value in arguments.exact_below or ():
        if value != "auto" and not value.isdecimal():
            raise ValueError(f"--exact_below must be a number of tokens or auto, got {value!r}")
    if min(arguments.max_length, arguments.per_device_eval_batch_size) < 1 or arguments.distractors < 0:
        raise ValueError("--max_length and --per_device_eval_batch_size must be at least 1, --distractors at least 0")
    arguments.name = arguments.name or f"glue_{arguments.task_name.lower()}"
    return arguments


Adapted = Mapping[str, Mapping[str, Any]]


def parse_task_options(texts: Sequence[str]) -> dict[str, list[str]]:
    """Reads `["cola:num_train_epochs=5"]` as `{"cola": ["--num_train_epochs", "5"]}`.

    Raises ValueError for other forms.

    Args:
        texts: options of tasks, `TASK:NAME=VALUE`.
    """
    options: dict[str, list[str]] = {}
    for text in texts:
        task, colon, setting = text.partition(":")
        name, equals, value = setting.partition("=")
        if not (colon and equals and name):
            raise ValueError(f"--task_options expects TASK:NAME=VALUE, got {text!r}")
        table.column(task)
        options.setdefault(task, []).extend([f"--{name}", value])
    return options


def train_cell(
    task: str, backend: launch.Backend, seed: int, folder: Path, common: Sequence[str], num_processes: int
) -> tuple[table.Run, bool]:
    """Gives the run of one cell, and whether it was trained now (False: it was finished before).

    Args:
        task: name of the GLUE task.
        backend: the attention.
        seed: of the training.
        folder: of the run.
        common: arguments of `favor.train.glue` that do not depend on the cell.
        num_processes: processes of the training.

    Raises:
        ValueError: if the folder holds a finished run with other arguments.
        RuntimeError: if the training fails.
    """
    arguments = ["--task_name", task, *backend.arguments(), "--seed", str(seed), *common]
    results, machine, trained = launch.train_once(arguments, backend, folder, num_processes)
    return run_from_results(results, backend.label, machine), trained


def model_in_words(path: str) -> str:
    """Gives the pretrained model's name, without the folders of this machine."""
    if MODULE in Path(path).parts:
        return f"the 6-layer MiniLM BERT of the PyPI package {PACKAGE} (model.safetensors sha256 {SHA256})"
    return Path(path).name if Path(path).exists() else path


def run_from_results(results: dict[str, Any], backend: str, machine: str) -> table.Run:
    """Makes one record of the table from the `all_results.json` of one seed.

    Args:
        results: the content of the file.
        backend: name of the row.
        machine: machine of the training.
    """
    column = table.column(results["task_name"])
    if len(results["seeds"]) != 1:
        raise ValueError(f"expected the results of one seed, got seeds {results['seeds']}; give a folder of one seed")
    return table.Run(
        task=column.task,
        backend=backend,
        seed=results["seeds"][0],
        value=results["metrics"][column.metric],
        baseline=results["baseline"][column.metric],
        train_rows=results["train_samples"],
        seconds_per_step=results["seconds_per_step"],
        peak_memory_mb=results["peak_memory_bytes"] / 2**20,
        details={
            "machine": machine,
            "model": model_in_words(results["model_name_or_path"]),
            "versions": results["versions"],
            "all_metrics": results["metrics"],
            "steps": results["steps"],
            "options": results["favor"],
            "sources": results["sources"],
            "constant_predictions": bool(results["constant_prediction_seeds"]),
        },
    )


def train_all(
    arguments: argparse.Namespace, rest: Sequence[str], adapted: Adapted
) -> tuple[list[table.Run], list[str]]:
    """Trains the missing runs, seed by seed, and writes the report after each run; returns runs and failures."""
    hold(arguments.output_dir)
    default = () if arguments.adapted else DEFAULT_BACKENDS
    backends = [launch.Backend.parse(text) for text in arguments.backends or default]
    backends += [launch.Backend.adapted(folder) for folder in arguments.adapted]
    options = parse_task_options(arguments.task_options)
    model = arguments.model_name_or_path or (str(minilm_path()) if any(not one.folder for one in backends) else "")
    config = Path(model) / "config.json"
    if config.is_file() and "ForSequenceClassification" in config.read_text():
        print(f"{model} is a classifier and is trained further; with --task_name it is evaluated as it is")
    data = ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    cells = [(s, t, b) for s in arguments.seeds or [0] for t in arguments.tasks for b in backends]
    runs: list[table.Run] = []
    failures: list[str] = []
    for number, (seed, task, backend) in enumerate(cells, 1):
        name = f"[{number}/{len(cells)}] {task} {backend.label} seed {seed}"
        common = ["--model_name_or_path", backend.folder or model, *data, *rest, *options.get(task, [])]
        folder = arguments.output_dir / task / backend.slug / f"seed_{seed}"
        start = time.perf_counter()
        try:
            run, trained = train_cell(task, backend, seed, folder, common, arguments.num_processes)
        except RuntimeError as error:
            failures.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        runs.append(run)
        took = f"{time.perf_counter() - start:.0f} s" if trained else "was finished before"
        print(f"{name}: {100 * run.value:.2f} (baseline {100 * (run.baseline or 0):.2f}), {took}", flush=True)
        write_report(runs, arguments, adapted)
    return runs, failures


def evaluate_all(arguments: argparse.Namespace) -> tuple[list[table.Run], list[str]]:
    """Evaluates every saved run of the chosen tasks; also returns those that do not repeat their training's metric."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    runs: list[table.Run] = []
    failures: list[str] = []
    for folder, results in checkpoints.find_runs(arguments.checkpoints):
        record = checkpoints.record_of(folder, results)
        backend = record["backend"]
        asked = (
            results["task_name"] in arguments.tasks
            and (arguments.backends is None or backend in arguments.backends)
            and (arguments.seeds is None or results["seeds"][0] in arguments.seeds)
        )
        if not asked:
            continue
        trained = run_from_results(results, backend, record["machine"])
        scores, tokens = checkpoints.evaluate(folder, results, arguments.data_dir)
        before = trained.details["all_metrics"]
        details = trained.details | {"all_metrics": scores}
        if details["options"]:
            short = [number <= details["options"]["num_features"] for number in tokens]
            details["short_samples"] = sum(short) / len(short)
        again = replace(trained, value=scores[table.column(trained.task).metric], details=details)
        known = [name for name in scores if name in before]
        same = all(abs(scores[name] - before[name]) <= arguments.tolerance for name in known)
        found, expected = (", ".join(f"{name} {100 * of[name]:.4f}" for name in known) for of in (scores, before))
        print(f"{folder}: {found}, {'as' if same else 'NOT AS'} in training ({expected})")
        runs.append(again)
        if not same:
            failures.append(str(folder))
    return runs, failures


def lengths_lines(runs: Sequence[table.Run]) -> list[str]:
    """Says how many samples have at most as many tokens as a backend has features, if runs were evaluated again."""
    shares = {
        (run.details["options"]["num_features"], run.task): run.details.get("short_samples")
        for run in runs
        if run.details["options"]
    }
    lines = []
    for limit in sorted({number for number, _ in shares}):
        found = [
            f"{task} {share:.0%}"
            for (number, task), share in sorted(shares.items())
            if number == limit and share is not None
        ]
        lines += [f"- Samples with at most {limit} tokens: {', '.join(found)}"] if found else []
    return lines


def report_lines(runs: Sequence[table.Run], arguments: argparse.Namespace, command: str, adapted: Adapted) -> list[str]:
    """Writes the Markdown report: settings, scores, costs, and how models were adapted.

    Args:
        runs: all runs.
        arguments: of the program.
        command: the command line.
        adapted: from `adaptation.read`.
    """
    machines = sorted({run.details["machine"] for run in runs})
    sources = sorted({f"{run.task}: {', '.join(run.details['sources'].values())}" for run in runs})
    options = sorted(
        {f"`{run.backend}`: {json.dumps(run.details['options'])}" for run in runs if run.details["options"]}
    )
    constant = [
        f"`{run.backend}` on {run.task}, seed {run.seed}" for run in runs if run.details["constant_predictions"]
    ]
    versions = sorted({", ".join(f"{k} {v}" for k, v in run.details["versions"].items()) for run in runs})
    models = sorted({run.details["model"] for run in runs})
    seeds = sorted({run.seed for run in runs})
    heading = "saved checkpoints, evaluated again" if arguments.checkpoints else "fine-tuned by favor.train.glue"
    lines = [
        "# GLUE, development sets, x 100",
        "",
        *([arguments.note, ""] if arguments.note else []),
        f"- Model: {'; '.join(models)}; {heading}",
        f"- Seeds: {', '.join(map(str, seeds))}; mean ± sample standard deviation where there are several",
        f"- Data: {'; '.join(sources)}",
        *lengths_lines(runs),
        *table.mismatched_lines(runs),
        *(f"- Backend {text}" for text in options),
        *([f"- Warning: constant predictions of {', '.join(constant)}"] if constant else []),
        *(f"- Machine: {text}" for text in machines),
        *(f"- Versions: {text}" for text in versions),
        f"- Command: `{command}`",
        "",
        *table.score_lines(runs),
        "",
        "Bold: the best linear backend of a column; a row that is not a linear backend (`sdpa`) is exact softmax",
        "attention, the reference. The paper's rows are its Table 1, with BERT-base (12 layers, 768 wide, pre-trained",
        "with each kind of attention, full training sets): another model than the one above, so compare the order of",
        f"the backends, not the numbers. {table.DASH} was not run; mean: over the tasks that were.",
        "",
        "## Cost: median seconds a training step, peak memory of the process",
        "",
        *table.cost_lines(runs),
        *(adaptation.lines(adapted) if adapted else []),
    ]
    return lines


def write_report(runs: Sequence[table.Run], arguments: argparse.Namespace, adapted: Adapted) -> None:
    """Writes NAME.md, NAME.json and NAME.png into the results folder."""
    folder = arguments.results_dir or arguments.output_dir
    command = "python -m favor.eval.glue " + shlex.join(arguments.command)
    content = {
        "command": command,
        "rows": table.summarise(runs),
        "majority_baseline": table.baselines(runs),
        "training_rows": table.train_rows(runs),
        "paper_table_1": {
            name: dict(zip((c.task for c in table.COLUMNS), values, strict=True))
            for name, values in table.PAPER.items()
        },
        "adaptation": adapted,
    }
    write_files(folder, arguments.name, report_lines(runs, arguments, command, adapted), content, indent=2)
    table.plot(runs, folder / f"{arguments.name}.png")


@releases_locks
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a run failed or did not repeat its metric."""
    arguments, rest = parse_arguments(argv)
    if getattr(arguments, "task_name", None) is not None:
        from favor.eval.glue import classifier

        return classifier.run(arguments)
    adapted = adaptation.read(arguments.adapted)
    runs, failures = evaluate_all(arguments) if arguments.checkpoints else train_all(arguments, rest, adapted)
    if runs:
        write_report(runs, arguments, adapted)
        print("\n".join(["", *table.score_lines(runs), *table.mismatched_lines(runs), "", *table.cost_lines(runs)]))
        print(f"\nwritten to {arguments.results_dir or arguments.output_dir}")
    if failures:
        print("failed: " + "; ".join(failures), file=sys.stderr)
    return 1 if failures or not runs else 0


cli = program("favor.eval.glue", main)


if __name__ == "__main__":
    cli()
