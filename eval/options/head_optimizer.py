"""Optimizers of a softmax output layer: AdamW with a learning rate of its own, and `favor.optim.SoftmaxBound`.

    python -m favor.eval.head_optimizer --images_dir DIR --glue_dir DIR --text FILE --runs_file FILE

The body of each network trains with AdamW. Its output layer trains with AdamW, with `SoftmaxBound`, or, on the cheap
task, with plain gradient descent; learning rates are constant, weight decay is 0. The program compares the training
losses after 1, 2 and 5 epochs. For each number of epochs it chooses a configuration of each optimizer: every
configuration of a grid, at least as many for AdamW as for SoftmaxBound, runs with seed 0 (with all seeds if that is
cheap), and the one with the lowest training loss runs with all seeds. If an epoch is expensive, the grid runs for 2
epochs only, and the best few configurations of each optimizer continue to 5. A seed determines the initial parameters,
the order of the samples and the dropout, equally for all optimizers.

Tasks: `fashion` (10 labels, --images_dir), `sst2` (2 labels, --glue_dir) and `text` (8192 labels, --text); see
`favor.eval.optim.head_tasks`. Finished runs are kept in the file --runs_file and are not repeated if the program is
started again with that file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

TASKS = ("fashion", "sst2", "text")
IMAGES = "fashion_mnist_10k.npz"
MILESTONES = (1, 2, 5)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.head_optimizer", __doc__)
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
