"""Kernel classification with random features: Figure 3 of the FAVOR# paper.

    python -m favor.eval.kernel_classification --data_dir DIR
    python -m favor.eval.kernel_classification --datasets iris wine breast_cancer digits

Nadaraya-Watson: the class of u* is the largest entry of sum_i K(s u*, s u_i) onehot(r_i) over the training set, with
the Gaussian kernel K = exp(-|x - y|^2/2) estimated by random features (alpha = -1/2). Each data set is shuffled and
split 90/5/5, equally for all methods. s is the best of ten values from 0.01 to 100 on the validation part, by the mean
accuracy over 50 draws of the features; the test accuracy is the mean over 50 fresh draws. Parameters of positive
features are fitted, without labels, to the two sets of the kernel: queries (validation or test inputs) as x and
training inputs as y. Directions are orthogonal, and in opposite pairs for families with opposite pairs as their default
(cderf). A number M below the largest uses the first M features of each draw.

DIR holds the UCI files (see `favor.eval.figures.kernel_data`) or your own CSV files, named by --datasets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

POSITIVE = ("pos", "gerf", "saderf", "aderf", "sderf", "cderf")
RBF_SAMPLER = "RBFSampler"
METHODS = (RBF_SAMPLER, "trig", *POSITIVE)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.kernel_classification", __doc__)
    parser.add_argument("--data_dir", type=Path, help="folder of data files; default: scikit-learn's bundled sets")
    parser.add_argument(
        "--datasets", nargs="+", help="data sets; default: the eight UCI sets, without a folder the bundled ones"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="methods to compare"
    )
    parser.add_argument(
        "--num_features", type=int, nargs="+", default=[16, 32, 64, 128], metavar="M", help="numbers of random features"
    )
    parser.add_argument(
        "--scales", type=float, nargs="+", metavar="S", help="factors s of the inputs; default: ten from 0.01 to 100"
    )
    parser.add_argument(
        "--feature_seeds", type=int, default=50, help="draws of the features, in validation and in test"
    )
    parser.add_argument("--shuffles", type=int, default=1, help="shuffles of each data set; results are their mean")
    parser.add_argument("--max_rows", type=int, default=0, help="rows of a data set that are used; 0 (default): all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first shuffle")
    add_results(parser, "kernel_classification")
    arguments = parser.parse_args(argv)
    import numpy as np

    from favor.eval.figures.kernel_data import BUNDLED, UCI

    arguments.scales = arguments.scales or list(np.logspace(-2, 2, 10))

    arguments.datasets = arguments.datasets or list(UCI if arguments.data_dir else BUNDLED)
    arguments.num_features = sorted(arguments.num_features)
    if any(count < 2 or count % 2 for count in arguments.num_features):
        parser.error("--num_features must be even: sin/cos and opposite directions come in pairs")
    if min(arguments.feature_seeds, arguments.shuffles) < 1 or min(arguments.scales) <= 0:
        parser.error("--feature_seeds and --shuffles must be at least 1, and --scales positive")
    return arguments
