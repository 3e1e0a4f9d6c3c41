"""Time of an exact full-rank step on one example, compared with a step of stochastic gradient descent.

    python -m favor.eval.exact_step

The data are one example and an output layer of n labels on d inputs, in float32 on the CPU. Four steps run in turn:
gradient descent in place (logits, softmax, update of rank one: the least that any step must do), with which
`favor.optim.exact_step_` is compared, and `torch.optim.SGD` (forward, backward, step), with which
`favor.optim.ProxBoundSGD` is compared. A number of labels is only timed if the solution of its system has a small
residual.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.exact_step", __doc__)
    parser.add_argument(
        "--labels",
        type=int,
        nargs="+",
        default=[1000, 3000, 10_000, 30_000, 100_000],
        metavar="N",
        help="numbers of labels",
    )
    parser.add_argument("--inputs", type=int, default=512, help="number of inputs d")
    parser.add_argument("--repeats", type=int, default=51, help="measurements of each step")
    parser.add_argument("--warmup", type=int, default=5, help="runs of each step before it is measured")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    add_results(parser, "exact_step")
    arguments = parser.parse_args(argv)
    if len(set(arguments.labels)) < 2 or min(*arguments.labels, arguments.inputs) < 2:
        parser.error("--labels must be at least two numbers, all of them and --inputs at least 2")
    if min(arguments.repeats, arguments.threads) < 1 or arguments.warmup < 0:
        parser.error("--repeats and --threads must be at least 1, --warmup not negative")
    return arguments
