"""Bound majorization compared with other optimizers of l2-regularised multinomial logistic regression.

    python -m favor.eval.majorization
    python -m favor.eval.majorization --uci_dir DIR --images_dir DIR --datasets secstr digit1 text mnist adult ecoli

All methods minimise F(W) = mean_j [logsumexp(W x_j) - (W x_j)_{y_j}] + lam/2 |W|^2 from the same point near 0. The
minimum F* is that of scipy's L-BFGS in double precision. The report has F - F* and the test error, by passes over the
data and by seconds. Seconds are processor time of one thread, which other processes do not disturb, of steps alone and
without evaluations. `favor.eval.optim.majorization_steps` defines a pass, and `favor.eval.optim.majorization_data` the
scaling of the data.

Every method has the same budget to find its step size and other options: a search of at most --trials short runs with
seed 0, which together take at most as long as one run; the best objective at their end wins. A run ends after
--num_train_epochs passes (full-batch methods: five times as many, a tuning run: a tenth), after --time_limit seconds of
optimisation, or when F - F* is 1e-6 F*. It also ends when F is not finite or a thousand times its first value: the
method has diverged.
A seed determines split, initial point and order of examples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser, did_you_mean

QUICK = ("synthetic", "digits", "breast_cancer")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.majorization", __doc__)
    parser.add_argument("--datasets", nargs="+", default=list(QUICK), metavar="NAME", help="data sets")
    parser.add_argument("--uci_dir", type=Path, help="folder of the UCI files, for adult and ecoli")
    parser.add_argument("--images_dir", type=Path, help="folder of the image files, for mnist and fashion")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="methods to compare; default: all")
    parser.add_argument("--num_train_epochs", type=float, default=30, help="passes over the data (see above)")
    parser.add_argument("--trials", type=int, default=10, help="greatest number of configurations that are tried")
    parser.add_argument("--num_seeds", type=int, default=1, help="runs with the chosen configuration")
    parser.add_argument("--time_limit", type=float, default=8, help="seconds of a run, and of all trials together")
    parser.add_argument("--max_rows", type=int, default=0, help="rows of a data set that are used; 0 (default): all")
    add_results(parser, "majorization")
    arguments = parser.parse_args(argv)
    from favor.eval.optim.majorization_data import LAM_SUM
    from favor.eval.optim.majorization_methods import METHODS

    arguments.methods = arguments.methods or list(METHODS)
    for name, known in (("datasets", LAM_SUM), ("methods", METHODS)):
        unknown = [word for word in getattr(arguments, name) if word not in known]
        if unknown:
            parser.error(
                f"--{name} must be among {', '.join(known)}; got {unknown[0]}{did_you_mean(unknown[0], known)}"
            )
    if min(arguments.trials, arguments.num_seeds) < 1 or min(arguments.num_train_epochs, arguments.time_limit) <= 0:
        parser.error("--trials, --num_seeds, --num_train_epochs and --time_limit must be positive")
    if not math.isfinite(arguments.num_train_epochs):
        parser.error("--num_train_epochs must be finite")
    return arguments
