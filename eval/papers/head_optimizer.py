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
`favor.eval.papers.head_tasks`. Finished runs are kept in the file --runs_file and are not repeated if the program is
started again with that file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers import head_tasks
from favor.eval.papers.common import panels, save
from favor.eval.papers.head_tasks import IMAGES, HeadTask
from favor.optim import SoftmaxBound
from favor.train.common.loop import EpochSampler, mix
from favor.train.common.program import Parser, program

TASKS = {
    "fashion": lambda arguments: head_tasks.fashion(arguments.images_dir),
    "sst2": lambda arguments: head_tasks.sst2(arguments.glue_dir),
    "text": lambda arguments: head_tasks.text(arguments.text),
}
NEEDED = {"fashion": "images_dir", "sst2": "glue_dir", "text": "text"}
MILESTONES = (1, 2, 5)
SEEDS = 5
NOT_TUNED = ("head", "process_group", "capture")  # parameters of SoftmaxBound that do not change its steps
NAMES = {"adamw": "AdamW", "sgd": "SGD", "bound": "SoftmaxBound"}
NAMES |= {name: f"SoftmaxBound, {name}" for name in ("defaults", "recommended")}
COLORS = {"adamw": "C0", "sgd": "C7", "bound": "C3", "defaults": "C1", "recommended": "C1"}

Config = dict[str, Any]
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """The configurations of a task: every learning rate of the body with every choice for the output layer.

    These are learning rates of AdamW and of gradient descent, and options of SoftmaxBound, at most as many as of AdamW;
    `recommended` stands in for SoftmaxBound's defaults if these are not meant for the task. `finalists` per optimizer
    run beyond the second milestone (0: all). The mean training loss over `seeds` decides.
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
        rates = {"adamw": self.adamw, "sgd": self.sgd}
        choices = self.bound if head == "bound" else [{"lr": lr} for lr in rates[head]]
        return [config_of(head, body, **options) for body in self.body for options in choices]

    def at_edge(self, config: Config) -> bool:
        """Tells whether a learning rate of a configuration is the first or last of those that were tried."""
        tried = {"adamw": self.adamw, "sgd": self.sgd, "bound": {o["lr"] for o in self.bound if "lr" in o}}
        rates = tried[config["head"]]
        at_end = len(rates) > 1 and config["lr"] in (min(rates), max(rates))
        return at_end or config["body_lr"] in (min(self.body), max(self.body))


def _bound_grid(curvatures: Sequence[str], dampings: Sequence[float]) -> tuple[Config, ...]:
    return tuple({"curvature": own, "damping": damping} for own in curvatures for damping in dampings)


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


def label(config: Config) -> str:
    """Describes a configuration in words: learning rates, and those options of SoftmaxBound that are usually varied."""
    body = f"body {config['body_lr']:g}"
    if config["head"] != "bound":
        return f"{body}, head {config['lr']:g}"
    numbers = (f"{name} {config[name]:g}" for name in ("damping", "lr", "curvature_ema"))
    return ", ".join([body, config["curvature"], *numbers])


def optimizers(model: nn.Module, head: nn.Linear, config: Config) -> list[Optimizer]:
    """Makes one optimizer for the body and one for the output layer."""
    options = {name: value for name, value in config.items() if name not in ("head", "body_lr")}
    own = {id(parameter) for parameter in head.parameters()}
    body = AdamW([p for p in model.parameters() if id(p) not in own], lr=config["body_lr"], weight_decay=0.0)
    if config["head"] == "bound":
        return [body, SoftmaxBound(head, **options)]
    return [body, (SGD if config["head"] == "sgd" else AdamW)(head.parameters(), weight_decay=0.0, **options)]


def train(task: HeadTask, config: Config, seed: int, milestones: Sequence[int]) -> dict[str, Any]:
    """Runs one training, to the last of some numbers of epochs after which to measure.

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
    found: dict[str, Any] = {"train": {str(epochs): math.inf for epochs in milestones}, "steps": [], "seconds": []}
    found["test"] = {str(epochs): [math.inf, 0.0] for epochs in milestones}
    for epoch in range(max(milestones)):
        order.set_epoch(epoch)
        start = time.perf_counter()
        for rows in torch.tensor(list(order)).split(task.batch_size):
            loss, _ = task.loss(model, rows)
            found["steps"].append(round(loss.item(), 4))
            if not math.isfinite(loss.item()):
                return found
            loss.backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        found["seconds"].append(round(time.perf_counter() - start, 3))
        if epoch + 1 in milestones:
            loss_now = task.measure(model, "measured")[0]
            if not math.isfinite(loss_now):
                return found
            found["train"][str(epoch + 1)] = loss_now
            found["test"][str(epoch + 1)] = list(task.measure(model, "test"))
    return found


class Runs(report.Records):
    """Training runs, each done once and kept in a file of JSON lines."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, ("key", "run"))

    def get(self, task: HeadTask, config: Config, seed: int, milestones: Sequence[int]) -> Run:
        """Gives a run: from the file if it has all milestones, else a new one, which then takes its place."""
        key = json.dumps({"task": task.name, **task.settings, "config": config, "seed": seed}, sort_keys=True)
        found = self.find(key)
        if found is not None and all(str(epochs) in found["train"] for epochs in milestones):
            return found
        run = train(task, config, seed, milestones)
        self.add(key, run)
        losses = " ".join(f"{loss:.4f}" for loss in run["train"].values())
        print(f"{task.name}: {config['head']}, {label(config)}, seed {seed}: {losses}", flush=True)
        return run


@dataclass(frozen=True)
class Entry:
    """One configuration after one number of epochs, with all seeds."""

    method: str
    epochs: int
    config: Config
    at_edge: bool
    train: list[float]
    test: list[float]
    accuracy: list[float]
    seconds: float

    @classmethod
    def of(cls, method: str, epochs: int, config: Config, runs: Sequence[Run], at_edge: bool) -> Entry:
        """Makes an entry from the runs with all seeds."""
        key = str(epochs)
        test, accuracy = ([run["test"][key][i] for run in runs] for i in (0, 1))
        seconds = statistics.median([second for run in runs for second in run["seconds"]] or [0.0])
        return cls(method, epochs, config, at_edge, [run["train"][key] for run in runs], test, accuracy, seconds)


def select(runs: Runs, task: HeadTask, grid: Grid, head: str) -> dict[int, Config]:
    """Finds, for each milestone, the configuration with the lowest training loss over the grid's seeds."""
    configs = grid.configs(head)
    early = MILESTONES[:2] if grid.finalists else MILESTONES
    winners: dict[int, Config] = {}

    for epochs in MILESTONES:
        among = early if epochs in early else MILESTONES
        losses = [
            sum(runs.get(task, config, seed, among)["train"][str(epochs)] for seed in range(grid.seeds))
            for config in configs
        ]
        order = sorted(range(len(configs)), key=losses.__getitem__)
        winners[epochs] = configs[order[0]]
        if grid.finalists and epochs == early[-1]:
            configs = [configs[place] for place in order[: grid.finalists]]
    return winners


def compare(runs: Runs, task: HeadTask, grid: Grid) -> tuple[list[Entry], dict[str, list[list[float]]]]:
    """Runs the best of all optimizers, and SoftmaxBound untuned, with all seeds; gives the last runs' losses too."""
    best = {head: select(runs, task, grid, head) for head in ("adamw", "sgd", "bound") if grid.configs(head)}
    # The result of a user who only replaces the optimizer of the output layer.
    untuned, options = ("defaults", {}) if grid.recommended is None else ("recommended", grid.recommended)
    replaced = {epochs: config_of("bound", c["body_lr"], **options) for epochs, c in best["adamw"].items()}
    entries: list[Entry] = []
    steps: dict[str, list[list[float]]] = {}  # of the longest runs
    for method, winners in (best | {untuned: replaced}).items():
        # The longest first: a longer run of one configuration also holds the results of the shorter ones.
        for epochs in sorted(winners, reverse=True):
            upto = [number for number in MILESTONES if number <= epochs]
            found = [runs.get(task, winners[epochs], seed, upto) for seed in range(SEEDS)]
            at_edge = method in best and grid.at_edge(winners[epochs])
            entries.append(Entry.of(method, epochs, winners[epochs], found, at_edge))
            steps.setdefault(method, [run["steps"] for run in found])
    return entries, steps


def checks(results: Mapping[str, Sequence[Entry]]) -> list[report.Check]:
    """Checks that SoftmaxBound has a lower mean training loss than AdamW, for every task and number of epochs."""
    found = []
    for task, entries in results.items():
        rivals = {entry.epochs: entry for entry in entries if entry.method == "adamw"}
        for entry in entries:
            rival = rivals.get(entry.epochs)
            if entry.method not in ("bound", "defaults", "recommended") or rival is None:
                continue
            ours, theirs = np.mean(entry.train), np.mean(rival.train)
            name = NAMES[entry.method]
            statement = f"{task}, {entry.epochs} epochs: {name} has a lower training loss than the best AdamW"
            numbers = f"{ours:.4f} and {theirs:.4f}, lower in {_wins(entry, rival)}"
            found.append(report.Check(statement, numbers, bool(ours < theirs)))
    return sorted(found, key=lambda check: check.statement)


def _wins(entry: Entry, rival: Entry) -> str:
    pairs = list(zip(entry.train, rival.train, strict=True))
    return f"{sum(one < two for one, two in pairs)} of {len(pairs)} seeds"


def report_lines(results: Mapping[str, Sequence[Entry]], tasks: Mapping[str, HeadTask]) -> list[str]:
    """Writes the Markdown report, a section per task; the lowest training loss after a number of epochs is bold."""
    lines = ["# Optimizers of a softmax output layer", "", settings_text(list(tasks))]
    header = ["method", "epochs", "configuration", "training loss", "below AdamW", "test loss", "test accuracy, %"]
    for name, entries in results.items():
        rows = []
        for entry in sorted(entries, key=lambda entry: entry.epochs):
            group = [other for other in entries if other.epochs == entry.epochs]
            lowest = min(float(np.mean(other.train)) for other in group)
            rival = next(other for other in group if other.method == "adamw")
            loss, edge = _spread(entry.train), " (edge)" if entry.at_edge else ""
            row = [NAMES[entry.method], str(entry.epochs), f"{label(entry.config)}{edge}"]
            row += [f"**{loss}**" if np.mean(entry.train) == lowest else loss]
            row += ["" if entry is rival else _wins(entry, rival), _spread(entry.test)]
            rows.append([*row, f"{100 * np.mean(entry.accuracy):.1f}", f"{entry.seconds:.2f}"])
        lines += ["", f"## {name}", "", tasks[name].about, "", *report.table([*header, "s/epoch"], rows)]
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"


def settings_text(tasks: Sequence[str]) -> str:
    """Explains in words how the measurements were made."""
    grids = {name: GRIDS[name] for name in tasks}
    pairs = [(len(grid.configs("adamw")), len(grid.configs("bound")), name) for name, grid in grids.items()]
    counts = ", ".join(f"{adamw} and {bound} ({name})" for adamw, bound, name in pairs)
    text = (
        "The body of each network trains with AdamW, its output layer as the row says. Learning rates are constant, "
        f"weight decay is 0. Configurations tried for AdamW and for SoftmaxBound: {counts}. The one with the "
        "lowest training loss with seed 0 after a number of epochs competes there, so that the rows of an optimizer "
        f"may be different configurations; mean and standard deviation over {SEEDS} seeds, 0 included. A seed "
        "determines the initial parameters, the order of the samples and the dropout, for all the same. Defaults and "
        "recommended: the body's learning rate of the best AdamW, and for the output layer the defaults, or for "
        "thousands of labels what the documentation recommends, which trial runs with seed 0 suggested. (edge): a "
        "learning rate is the first or last of the grid. The training loss is taken in evaluation mode."
    )
    dear = [name for name, grid in grids.items() if grid.finalists]
    if dear:
        text += (
            f" On {' and '.join(dear)} the grid runs for {MILESTONES[1]} epochs, and the best "
            f"{grids[dear[0]].finalists} of each optimizer are run on to {MILESTONES[-1]}."
        )
    return text


def plot(steps: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], path: Path, points: int = 40) -> None:
    """Draws a panel per task: training loss of the batches against steps, of the best after the last epoch.

    Each of the `points` of a curve is the mean over seeds and over neighbouring steps.
    """
    figure, grid = panels(1, len(steps), 4.2, 3.4)
    for axes, (name, methods) in zip(grid[0], steps.items(), strict=True):
        for method, losses in methods.items():
            number = min(map(len, losses))
            mean = np.mean([of[:number] for of in losses], axis=0)
            parts = np.array_split(np.arange(number), min(points, number))
            style = {"color": COLORS[method], "label": NAMES[method]}
            axes.plot([part.mean() + 1 for part in parts], [mean[part].mean() for part in parts], **style)
        axes.set(title=f"{name}: best after {MILESTONES[-1]} epochs", xlabel="steps", yscale="log")
        axes.legend(fontsize=8)
    grid[0][0].set_ylabel("training loss of the batches")
    save(figure, path)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.head_optimizer", __doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help="tasks to run")
    parser.add_argument("--images_dir", type=Path, help=f"folder of {IMAGES}")
    parser.add_argument("--glue_dir", type=Path, help="folder of GLUE's TSV files")
    parser.add_argument("--text", type=Path, help="a long text, plain or compressed")
    parser.add_argument("--runs_file", type=Path, help="file of finished runs, JSON lines; it is made if needed")
    add_results(parser, "head_optimizer")
    arguments = parser.parse_args(argv)
    for task in arguments.tasks:
        if getattr(arguments, NEEDED[task]) is None:
            parser.error(f"task {task} needs --{NEEDED[task]}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(1)
    runs = Runs(arguments.runs_file)
    tasks = {name: TASKS[name](arguments) for name in arguments.tasks}
    found = {name: compare(runs, task, GRIDS[name]) for name, task in tasks.items()}
    results = {name: entries for name, (entries, _) in found.items()}
    plot({name: steps for name, (_, steps) in found.items()}, arguments.output_dir / f"{arguments.name}.png")
    rows = {name: [*map(asdict, entries)] for name, entries in results.items()}
    of_task = {name: {"settings": dict(tasks[name].settings), "entries": rows[name]} for name in tasks}
    context: Any = ("favor.eval.papers.head_optimizer", argv, ("transformers", "numpy"))
    content = report.context_of(*context, ["--images_dir", "--glue_dir", "--text"], "--runs_file")
    content |= {"seeds": SEEDS, "tasks": of_task}
    return report.finish(arguments, report_lines(results, tasks), content, checks(results))


cli = program("favor.eval.papers.head_optimizer", main)


if __name__ == "__main__":
    cli()
