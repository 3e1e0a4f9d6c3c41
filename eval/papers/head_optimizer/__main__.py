"""Optimizers of a softmax output layer: AdamW with a learning rate of its own, and `favor.optim.SoftmaxBound`.

    python -m favor.eval.papers.head_optimizer --images_dir DIR --glue_dir DIR --text FILE --runs_file FILE

The body of each network trains with AdamW. Its output layer trains with AdamW, with `SoftmaxBound`, or, on the cheap
task, with plain gradient descent; learning rates are constant, weight decay is 0. The program compares the training
losses after 1, 2 and 5 epochs. For each number of epochs it chooses a configuration of each optimizer: every
configuration of a grid, at least as many for AdamW as for SoftmaxBound, runs with seed 0 (with all seeds if that is
cheap), and the one with the lowest training loss runs with all seeds. If an epoch is expensive, the grid runs for 2
epochs only, and the best few configurations of each optimizer continue to 5. A seed determines the initial parameters,
the order of the samples and the dropout, equally for all optimizers.

Tasks: `fashion` (10 labels, --images_dir), `sst2` (2 labels, --glue_dir) and `text` (8192 labels, --text); see
`favor.eval.papers.head_optimizer.tasks`. Finished runs are kept in the file --runs_file and are not repeated if the
program is started again with that file.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers.head_optimizer import report as head_report
from favor.eval.papers.head_optimizer import tasks as head_tasks
from favor.eval.papers.head_optimizer.report import Entry, label
from favor.eval.papers.head_optimizer.tasks import IMAGES, HeadTask
from favor.optim import SoftmaxBound
from favor.train.common.loop import EpochSampler, mix
from favor.train.common.program import Parser, program

TASKS = ("fashion", "sst2", "text")
MILESTONES = (1, 2, 5)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.head_optimizer", __doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="tasks to run")
    parser.add_argument(
        "--head_optimizers",
        nargs="+",
        choices=("adamw", "sgd", "bound"),
        default=["adamw", "sgd", "bound"],
        help="optimizers of the output layer",
    )
    parser.add_argument("--images_dir", type=Path, help=f"folder of {IMAGES}")
    parser.add_argument("--glue_dir", type=Path, help="folder of GLUE's TSV files")
    parser.add_argument("--text", type=Path, help="a long text, plain or compressed")
    parser.add_argument("--sst2_samples", type=int, default=640, help="training sentences of sst2")
    parser.add_argument("--text_tokens", type=int, default=64_000, help="training words of text")
    parser.add_argument("--num_seeds", type=int, default=5, help="number of seeds")
    parser.add_argument(
        "--epochs",
        type=int,
        nargs="+",
        default=list(MILESTONES),
        help="numbers of epochs after which to compare",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--runs_file", type=Path, help="file of finished runs, JSON lines; it is made if needed")
    add_results(parser, "head_optimizer")
    arguments = parser.parse_args(argv)
    needed = {"fashion": "images_dir", "sst2": "glue_dir", "text": "text"}
    for task in arguments.tasks:
        if getattr(arguments, needed[task]) is None:
            parser.error(f"task {task} needs --{needed[task]}")
    if min(arguments.num_seeds, arguments.threads, *arguments.epochs) < 1:
        parser.error("--num_seeds, --threads and all of --epochs must be at least 1")
    arguments.epochs = sorted(set(arguments.epochs))
    return arguments


NOT_TUNED = ("head", "process_group", "capture")  # parameters of SoftmaxBound that do not change its steps
Config = dict[str, Any]
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """The configurations of a task: every learning rate of the body with every choice for the output layer.

    Args:
        body: learning rates of the body.
        adamw: learning rates of AdamW for the output layer.
        bound: options of SoftmaxBound, at most as many as learning rates in `adamw`.
        recommended: options that the documentation recommends if SoftmaxBound's defaults are not meant for the task.
        sgd: learning rates of gradient descent for the output layer.
        finalists: number of configurations per optimizer that run beyond the second milestone; 0 means all.
        seeds: number of seeds whose mean training loss decides.
    """

    body: tuple[float, ...]
    adamw: tuple[float, ...]
    bound: tuple[Config, ...]
    recommended: Config | None = None
    sgd: tuple[float, ...] = ()
    finalists: int = 0
    seeds: int = 1

    def configs(self, head: str) -> list[Config]:
        """Lists all configurations with one optimizer of the output layer."""
        choices: dict[str, list[Config]] = {
            "adamw": [{"lr": lr} for lr in self.adamw],
            "sgd": [{"lr": lr} for lr in self.sgd],
            "bound": [dict(options) for options in self.bound],
        }
        return [config_of(head, body, **options) for body in self.body for options in choices[head]]

    def at_edge(self, config: Config) -> bool:
        """Tells whether a learning rate of a configuration is the first or last of those that were tried."""
        varied = tuple({options["lr"] for options in self.bound if "lr" in options})
        bound = varied if len(varied) > 1 else ()
        tried = {"adamw": self.adamw, "sgd": self.sgd, "bound": bound}[config["head"]]
        edges = {min(self.body), max(self.body)}
        return config["body_lr"] in edges or (bool(tried) and config["lr"] in (min(tried), max(tried)))


def _bound_grid(curvatures: Sequence[str], dampings: Sequence[float]) -> tuple[Config, ...]:
    pairs = itertools.product(curvatures, dampings)
    return tuple({"curvature": curvature, "damping": damping} for curvature, damping in pairs)


# The recommendation for thousands of labels.
GEOMETRIC: Config = {"curvature": "geometric", "damping": 1e-3, "lr": 0.3}
GRIDS = {
    "fashion": Grid(
        body=(3e-5, 1e-4, 3e-4, 1e-3),
        adamw=(3e-2, 1e-1, 3e-1, 1.0),
        bound=_bound_grid(("bohning", "diag"), (1e-2, 1e-1)),
        sgd=(0.3, 1.0, 3.0, 10.0),
        seeds=5,
    ),
    "sst2": Grid(
        body=(1e-4, 2e-4, 4e-4),
        adamw=(1e-3, 4e-3, 1.6e-2),
        bound=(*_bound_grid(("bohning",), (1e-2, 1e-1)), {"curvature": "diag", "damping": 1e-1}),
        finalists=2,
    ),
    "text": Grid(
        body=(3e-5, 1e-4, 3e-4),
        adamw=(1e-2, 3e-2, 1e-1),
        bound=tuple(GEOMETRIC | {"lr": lr} for lr in (0.15, 0.3, 0.6)),
        recommended=GEOMETRIC,
        finalists=2,
    ),
}


def config_of(head: str, body_lr: float, **options: Any) -> Config:
    """Makes one configuration; for SoftmaxBound with all its options, given or default."""
    if head == "bound":
        known = inspect.signature(SoftmaxBound).parameters.values()
        options = {p.name: p.default for p in known if p.name not in NOT_TUNED} | options
    return {"head": head, "body_lr": body_lr, **options}


def optimizers(model: nn.Module, head: nn.Linear, config: Config) -> list[Optimizer]:
    """Makes one optimizer for the body and one for the output layer.

    Args:
        model: the network.
        head: its output layer.
        config: from `config_of`.
    """
    options = {name: value for name, value in config.items() if name not in ("head", "body_lr")}
    own = {id(parameter) for parameter in head.parameters()}
    body = AdamW([p for p in model.parameters() if id(p) not in own], lr=config["body_lr"], weight_decay=0.0)
    if config["head"] == "bound":
        return [body, SoftmaxBound(head, **options)]
    if config["head"] == "sgd":
        return [body, SGD(head.parameters(), **options)]
    return [body, AdamW(head.parameters(), weight_decay=0.0, **options)]


def train(task: HeadTask, config: Config, seed: int, milestones: Sequence[int]) -> dict[str, Any]:
    """Runs one training.

    Args:
        task: network and data.
        config: from `config_of`.
        seed: draws the initial parameters, the order of the samples and the dropout.
        milestones: numbers of epochs after which to measure; the run ends with the last.

    Returns:
        "train": {epochs: training loss}; "test": {epochs: [loss, accuracy]}; "steps": loss of every batch; "seconds":
        of every epoch, without the measurements. If a loss is not finite, the run ends and all later losses are inf.
    """
    torch.manual_seed(seed)
    model = task.build().train()
    head = model.get_submodule(task.head)
    assert isinstance(head, nn.Linear)
    both = optimizers(model, head, config)
    torch.manual_seed(mix(seed, 1))
    order = EpochSampler(len(task.data["train"][1]), seed)
    found: dict[str, Any] = {"train": {}, "test": {}, "steps": [], "seconds": []}
    for epoch in range(max(milestones)):
        order.set_epoch(epoch)
        start = time.perf_counter()
        for rows in torch.tensor(list(order)).split(task.batch_size):
            loss, _ = task.loss(model, rows)
            found["steps"].append(round(loss.item(), 4))
            if not math.isfinite(loss.item()):
                return _diverged(found, milestones)
            loss.backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        found["seconds"].append(round(time.perf_counter() - start, 3))
        if epoch + 1 in milestones:
            loss_now = task.measure(model, "measured")[0]
            if not math.isfinite(loss_now):
                return _diverged(found, milestones)
            found["train"][str(epoch + 1)] = loss_now
            found["test"][str(epoch + 1)] = list(task.measure(model, "test"))
    return found


def _diverged(found: dict[str, Any], milestones: Sequence[int]) -> dict[str, Any]:
    for epochs in map(str, milestones):
        found["train"].setdefault(epochs, math.inf)
        found["test"].setdefault(epochs, [math.inf, 0.0])
    return found


class Runs:
    """Training runs, each done once and kept in a file of JSON lines.

    Args:
        path: the file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Run] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # a run was stopped while it wrote this line: it is done again
                self._keep(record["key"], record["run"])

    def _keep(self, key: str, run: Run) -> None:
        # A longer run holds all results of a shorter one.
        if len(run["train"]) >= len(self.known.get(key, {"train": {}})["train"]):
            self.known[key] = run

    def get(self, task: HeadTask, config: Config, seed: int, milestones: Sequence[int]) -> Run:
        """Gives a run: from the file if it has all milestones, else a new one.

        Args:
            task: network and data.
            config: from `config_of`.
            seed: of the run.
            milestones: numbers of epochs after which to measure.
        """
        key = json.dumps({"task": task.name, **task.settings, "config": config, "seed": seed}, sort_keys=True)
        found = self.known.get(key)
        if found is not None and all(str(epochs) in found["train"] for epochs in milestones):
            return found
        run = train(task, config, seed, milestones)
        self._keep(key, run)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
            with self.path.open("a") as stream:
                stream.write(("\n" if torn else "") + json.dumps({"key": key, "run": run}) + "\n")
        losses = " ".join(f"{loss:.4f}" for loss in run["train"].values())
        print(f"{task.name}: {config['head']}, {label(config)}, seed {seed}: {losses}", flush=True)
        return run


def select(runs: Runs, task: HeadTask, grid: Grid, head: str, milestones: Sequence[int]) -> dict[int, Config]:
    """Finds, for each milestone, the configuration with the lowest training loss over the grid's seeds.

    Args:
        runs: runs and does not repeat trainings.
        task: network and data.
        grid: the configurations.
        head: the optimizer of the output layer.
        milestones: numbers of epochs.
    """
    configs = grid.configs(head)
    early = milestones[:2] if grid.finalists else milestones
    winners: dict[int, Config] = {}
    seeds = range(grid.seeds)

    def loss_after(epochs: int, among: Sequence[int]) -> Callable[[Config], float]:
        return lambda config: sum(runs.get(task, config, seed, among)["train"][str(epochs)] for seed in seeds)

    for epochs in early:
        winners[epochs] = min(configs, key=loss_after(epochs, early))
    if len(early) < len(milestones):
        configs = sorted(configs, key=loss_after(early[-1], early))[: grid.finalists]
    for epochs in milestones[len(early) :]:
        winners[epochs] = min(configs, key=loss_after(epochs, milestones))
    return winners


def compare(
    runs: Runs, task: HeadTask, grid: Grid, heads: Sequence[str], seeds: int, milestones: Sequence[int]
) -> list[Entry]:
    """Runs the best configurations of all optimizers, and SoftmaxBound untuned, with all seeds.

    Args:
        runs: runs and does not repeat trainings.
        task: network and data.
        grid: the configurations.
        heads: optimizers of the output layer.
        seeds: number of seeds.
        milestones: numbers of epochs.
    """
    entries: list[Entry] = []
    best = {
        head: select(runs, task, grid, head, milestones)
        for head in ("adamw", "sgd", "bound")
        if head in heads and grid.configs(head)
    }
    chosen = {head: dict(winners) for head, winners in best.items()}
    if {"adamw", "bound"} <= set(best):
        # The result of a user who only replaces the optimizer of the output layer.
        untuned, options = ("defaults", {}) if grid.recommended is None else ("recommended", grid.recommended)
        chosen[untuned] = {epochs: config_of("bound", c["body_lr"], **options) for epochs, c in best["adamw"].items()}
    for method, winners in chosen.items():
        # The longest first: a longer run of one configuration also holds the results of the shorter ones.
        for epochs in sorted(winners, reverse=True):
            upto = [number for number in milestones if number <= epochs]
            found = [runs.get(task, winners[epochs], seed, upto) for seed in range(seeds)]
            at_edge = method in best and grid.at_edge(winners[epochs])
            entries.append(Entry.of(method, epochs, winners[epochs], found, at_edge))
    return entries


def settings_text(arguments: argparse.Namespace) -> str:
    """Explains in words how the measurements were made."""
    grids = {name: GRIDS[name] for name in arguments.tasks}
    counts = ", ".join(
        f"{len(grid.configs('adamw'))} and {len(grid.configs('bound'))} ({name})" for name, grid in grids.items()
    )
    untuned = []
    if any(grid.recommended is None for grid in grids.values()):
        untuned.append("Defaults: the body's learning rate of the best AdamW, and nothing tuned for the output layer. ")
    if any(grid.recommended is not None for grid in grids.values()):
        untuned.append(
            "Recommended: the body's learning rate of the best AdamW, and for the output layer what the documentation "
            "recommends for so many labels, which trial runs with seed 0 suggested. "
        )
    text = (
        "The body of each network trains with AdamW, its output layer as the row says. Learning rates are constant, "
        f"weight decay is 0. Configurations tried for AdamW and for SoftmaxBound: {counts}. The one with the "
        "lowest training loss with seed 0 after a number of epochs competes there, so that the rows of an optimizer "
        f"may be different configurations; mean and standard deviation over {arguments.num_seeds} seeds, 0 included. A "
        "seed determines the initial parameters, the order of the samples and the dropout, for all the same. "
        + "".join(untuned)
        + "(edge): a learning rate is the first or last of the grid. The training loss is taken in evaluation mode."
    )
    dear = [name for name, grid in grids.items() if grid.finalists]
    if dear:
        text += (
            f" On {' and '.join(dear)} the grid runs for {arguments.epochs[:2][-1]} epochs, and the best "
            f"{grids[dear[0]].finalists} of each optimizer are run on to {arguments.epochs[-1]}."
        )
    return text


def load_task(name: str, arguments: argparse.Namespace) -> HeadTask:
    """Loads a task by name; raises ValueError if its data are missing."""
    if name == "fashion":
        return head_tasks.fashion(arguments.images_dir)
    if name == "sst2":
        return head_tasks.sst2(arguments.glue_dir, samples=arguments.sst2_samples)
    return head_tasks.text(arguments.text, tokens=arguments.text_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    torch.set_num_threads(arguments.threads)
    runs = Runs(arguments.runs_file)
    tasks = {name: load_task(name, arguments) for name in arguments.tasks}
    results = {
        name: compare(runs, task, GRIDS[name], arguments.head_optimizers, arguments.num_seeds, arguments.epochs)
        for name, task in tasks.items()
    }
    found = head_report.checks(results)
    folders = ["--images_dir", "--glue_dir", "--text"]
    command = report.shown_command("favor.eval.papers.head_optimizer", words, folders, ["--output_dir", "--runs_file"])
    lines = head_report.report_lines(results, tasks, settings_text(arguments))
    content: dict[str, Any] = {
        **report.context(command, ("transformers", "numpy")),
        "seeds": arguments.num_seeds,
        "tasks": {
            name: {"settings": dict(tasks[name].settings), "entries": [entry.content() for entry in entries]}
            for name, entries in results.items()
        },
    }
    report.write(arguments.output_dir, arguments.name, lines, content, found)
    head_report.plot(results, arguments.output_dir / f"{arguments.name}.png")
    print("\n".join(["", *lines, "", *(check.line() for check in found)]))
    return int(not all(check.holds for check in found))


cli = program("favor.eval.papers.head_optimizer", main)


if __name__ == "__main__":
    cli()
