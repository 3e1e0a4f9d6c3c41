r"""GLUE: a classifier with exact and linear attention, or trainings: tasks x backends x seeds.

    python -m favor.eval.glue --model_name_or_path DIR --task_name mrpc --data_dir DIR --exact_below auto 0

With `--task_name` the model is a classifier that was fine-tuned on this task, anywhere. Nothing is trained: its scores
with exact attention and with each backend stand side by side. Labels are ordered by their names.

    python -m favor.eval.glue --data_dir DIR --tasks mrpc rte --backends sdpa favor+ favor#:saderf \
        --seeds 0 1 2 --output_dir out/glue --results_dir out/results --exact_below 0 --num_train_epochs 3

Without it a table in the layout of the FAVOR# paper's Table 1 is made. Each (task, backend, seed) is one training run
of `favor.train.glue` in a process of its own, in a folder of its own below `--output_dir`. If the program is started
again, it skips finished runs. `--adapted` adds models of `favor.train.distill` as rows. Unknown arguments are passed on
to `favor.train.glue`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor.eval.common import launch
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.processes import processes, shared_program
from favor.eval.common.report import write_files
from favor.eval.glue import classifier, table
from favor.train.common.lock import hold, releases_locks
from favor.train.common.program import Parser
from favor.train.glue import Arguments

DEFAULT_BACKENDS = ("sdpa", "favor+", "favor++", "favor#")
TRAINING = ("tasks", "adapted", "seeds", "task_options", "num_processes")
OWN_ARGUMENTS = ("--task_name", "--attn_implementation", "--features", "--seed")


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the arguments of the evaluation; returns them and the rest, which goes to `favor.train.glue`."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser("favor.eval.glue", __doc__)
    add, tasks = parser.add_argument, [column.task for column in table.COLUMNS]
    add("--model_name_or_path", help=f"default: the MiniLM BERT in the package {PACKAGE}")
    add("--data_dir", help="folder of GLUE in its official TSV layout; default: that of favor.train.glue")
    add("--tasks", nargs="+", default=tasks, choices=tasks, metavar="TASK", help="tasks to run")
    text = f"default: {' '.join(DEFAULT_BACKENDS)}, or none with --adapted; with --task_name: the one that the model "
    text += "was saved with, else landmark, and NAME:OPTION=VALUE,... is possible"
    add("--backends", nargs="+", metavar="NAME[:FEATURES][:M]", help=text)
    text = "folders of favor.train.distill: models that were adapted to their attention, each a row of its own"
    add("--adapted", nargs="+", default=[], metavar="DIR", help=text)
    add("--seeds", nargs="+", type=int, default=[0], help="a training for each")
    add("--output_dir", type=Path, default=Path("out/glue"), help="folder that gets one folder per run")
    add("--results_dir", type=Path, help="folder of glue.md and .json; default: the output folder")
    add("--name", help="file name of the results, without ending; default: glue, or glue_TASK")
    text = "training options of one task, for example cola:num_train_epochs=5; they replace common ones"
    add("--task_options", nargs="+", default=[], metavar="TASK:NAME=VALUE", help=text)
    add("--num_processes", type=int, default=1, help="processes (GPUs) of accelerate launch")
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
    given = [*rest, *(f"--{text.partition(':')[2]}" for text in arguments.task_options)]
    given = [word.split("=")[0] for word in given]
    for word in given:
        if word in own:
            raise ValueError(f"{word} is set by favor.eval.glue itself; use --tasks, --backends or --seeds")
    parser.check_passed_on(given, Arguments.parser())
    return arguments, rest


def _add_classifier(parser: Parser) -> None:
    """Adds the options of a classifier; without `--task_name` those that remain belong to `favor.train.glue`."""
    add = parser.add_argument_group("a classifier that was fine-tuned before").add_argument
    add("--task_name", help="task of --model_name_or_path: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli")
    text = "a row for each: backends run exact attention on fewer tokens than this; 0: never; auto (default): by speed"
    add("--exact_below", nargs="+", metavar="N", help=text)
    add("--label_names", nargs="+", metavar="NAME", help="names of the model's outputs in order, if its own do not say")
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


def parse_task_options(texts: Sequence[str]) -> dict[str, list[str]]:
    """Reads `["cola:num_train_epochs=5"]` as `{"cola": ["--num_train_epochs", "5"]}`; raises ValueError for others."""
    options: dict[str, list[str]] = {}
    for text in texts:
        found = re.fullmatch(r"(?s)([^:]*):([^=]+)=(.*)", text)
        if found is None:
            raise ValueError(f"--task_options expects TASK:NAME=VALUE, got {text!r}")
        task, name, value = found.groups()
        options.setdefault(table.column(task).task, []).extend([f"--{name}", value])
    return options


def train_all(arguments: argparse.Namespace, rest: Sequence[str]) -> tuple[list[table.Run], list[str]]:
    """Trains the missing runs, seed by seed, and writes the report after each run; returns runs and failures."""
    hold(arguments.output_dir)
    default = () if arguments.adapted else DEFAULT_BACKENDS
    backends = [launch.Backend.parse(text) for text in arguments.backends or default]
    backends += [launch.Backend.adapted(folder) for folder in arguments.adapted]
    adapted, options = table.read_adapted(arguments.adapted), parse_task_options(arguments.task_options)
    model = arguments.model_name_or_path or (str(minilm_path()) if any(not one.folder for one in backends) else "")
    config = Path(model) / "config.json"
    if config.is_file() and "ForSequenceClassification" in config.read_text():
        print(f"{model} is a classifier and is trained further; with --task_name it is evaluated as it is")
    data = ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    cells = [(s, t, b) for s in arguments.seeds for t in arguments.tasks for b in backends]
    runs: list[table.Run] = []
    failures: list[str] = []
    for number, (seed, task, backend) in enumerate(cells, 1):
        name = f"[{number}/{len(cells)}] {task} {backend.label} seed {seed}"
        words = ["--task_name", task, *backend.arguments(), "--seed", str(seed)]
        words += ["--model_name_or_path", backend.folder or model, *data, *rest, *options.get(task, [])]
        folder = arguments.output_dir / task / backend.slug / f"seed_{seed}"
        start = time.perf_counter()
        try:
            results, machine, trained = launch.train_once(words, backend, folder, arguments.num_processes)
        except RuntimeError as error:
            failures.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        runs.append(table.Run.of(results, backend.label, machine))
        took = f"{time.perf_counter() - start:.0f} s" if trained else "was finished before"
        print(f"{name}: {100 * runs[-1].value:.2f} (baseline {100 * runs[-1].baseline:.2f}), {took}", flush=True)
        write_report(runs, arguments, adapted)
    return runs, failures


def write_report(runs: Sequence[table.Run], arguments: argparse.Namespace, adapted: dict[str, Any]) -> None:
    """Writes NAME.md and NAME.json into the results folder: settings, scores, costs, and how models were adapted."""
    command = "python -m favor.eval.glue " + shlex.join(arguments.command)
    facts = [(run, run.details) for run in runs]
    constant = [f"`{run.backend}` on {run.task}, seed {run.seed}" for run, own in facts if own["constant_predictions"]]
    models = sorted({own["model"] for _, own in facts})
    data = sorted({f"{run.task}: {', '.join(own['sources'].values())}" for run, own in facts})
    lines = [
        "# GLUE, development sets, x 100",
        "",
        f"- Model: {'; '.join(models)}; fine-tuned by favor.train.glue",
        f"- Seeds: {', '.join(map(str, arguments.seeds))}; mean ± sample standard deviation where there are several",
        f"- Data: {'; '.join(data)}",
        *table.mismatched_lines(runs),
        *sorted({f"- Backend `{run.backend}`: {json.dumps(own['options'])}" for run, own in facts if own["options"]}),
        *([f"- Warning: constant predictions of {', '.join(constant)}"] if constant else []),
        *sorted({f"- Machine: {run.machine}" for run in runs}),
        *sorted({"- Versions: " + ", ".join(f"{k} {v}" for k, v in own["versions"].items()) for _, own in facts}),
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
        *table.adaptation_lines(adapted),
    ]
    names = [column.task for column in table.COLUMNS]
    content = {
        "command": command,
        "rows": table.summarise(runs),
        "majority_baseline": table.baselines(runs),
        "training_rows": table.train_rows(runs),
        "paper_table_1": {name: dict(zip(names, values, strict=True)) for name, values in table.PAPER.items()},
        "adaptation": adapted,
    }
    write_files(arguments.results_dir or arguments.output_dir, arguments.name, lines, content, indent=2)


@releases_locks
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a run failed."""
    arguments, rest = parse_arguments(argv)
    if getattr(arguments, "task_name", None) is not None:
        return classifier.run(arguments)
    if (number := processes().num_processes) > 1:
        raise ValueError(
            f"trainings start their own processes, but {number} were started: leave out accelerate launch and give "
            f"--num_processes {number}; several evaluate a classifier together, with --task_name"
        )
    runs, failures = train_all(arguments, rest)
    if runs:
        print("\n".join(["", *table.score_lines(runs), *table.mismatched_lines(runs), "", *table.cost_lines(runs)]))
        print(f"\nwritten to {arguments.results_dir or arguments.output_dir}")
    if failures:
        print("failed: " + "; ".join(failures), file=sys.stderr)
    return 1 if failures or not runs else 0


cli = shared_program("favor.eval.glue", main)


if __name__ == "__main__":
    cli()
