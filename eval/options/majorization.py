"""Bound majorization against other optimizers of l2-regularised multinomial logistic regression.

    python -m favor.eval.majorization
    python -m favor.eval.majorization --uci_dir DIR --images_dir DIR --datasets secstr digit1 text mnist adult ecoli

All methods minimise F(W) = mean_j [logsumexp(W x_j) - (W x_j)_{y_j}] + lam/2 |W|^2 from the same point near 0. The
minimum F* is that of scipy's L-BFGS in double precision. Reported are F - F* and the test error against passes over the
data and against seconds: processor time of one thread, which other processes do not disturb, for steps alone and not
for evaluation. What a pass is: `favor.eval.optim.majorization_steps`; how data are scaled:
`favor.eval.optim.majorization_data`.

Every method has the same budget for its step size and other options: a search of at most --trials short runs with seed
0, which together take as long as one run at most; the best objective at their end wins. A run ends after --epochs
passes (full-batch methods: five times as many, a tuning run a tenth), after --time_limit seconds of optimisation, when
F - F* is 1e-6 F*, or when F is not finite or a thousand times its first value: then the method has diverged. A seed
determines split, initial point and order of examples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

QUICK = ("synthetic", "digits", "breast_cancer")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the program; raises SystemExit for bad ones, as argparse does."""
    parser = Parser("favor.eval.majorization", __doc__, abbreviations=True)
    parser.add_argument("--datasets", nargs="+", default=list(QUICK), metavar="NAME", help="which data")
    parser.add_argument("--uci_dir", type=Path, help="folder of the UCI files, for adult and ecoli")
    parser.add_argument("--images_dir", type=Path, help="folder of the image files, for mnist and fashion")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="what is compared; default: all")
    parser.add_argument("--epochs", type=float, default=30, help="passes over the data (see above)")
    parser.add_argument("--trials", type=int, default=10, help="configurations that are tried, at most")
    parser.add_argument("--seeds", type=int, default=1, help="runs with the configuration that was chosen")
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
            parser.error(f"--{name} must be among {', '.join(known)}; got {unknown[0]}")
    if min(arguments.trials, arguments.seeds) < 1 or min(arguments.epochs, arguments.time_limit) <= 0:
        parser.error("--trials, --seeds, --epochs and --time_limit must be positive")
    if not math.isfinite(arguments.epochs):
        parser.error("--epochs must be finite")
    return arguments
