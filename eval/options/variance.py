"""Variance of random features by regime and scale: Figure 2 of the FAVOR# paper, from closed forms.

    python -m favor.eval.variance --images_dir DIR

For two sets of L vectors the parameters of each family are fitted to the pair of sets. The curves are the mean of
log(Var / K^2), M = 1, over all pairs of vectors and over several pairs of sets; less is better. (The paper prints
Var / K: its curves are shifted by the mean of x.y, equally for all families.) Only the data are sampled. Six regimes:

- normal: x, y ~ N(0, sigma^2 I); sphere: uniform on the sphere of radius sigma; heterogen: x ~ N(0, sigma^2 I) and
  y ~ N(sigma 1, sigma^2 I);
- mnist, cifar10: grey images in [0, 1], resized to 8 x 8 by averaging over the area of each new pixel, flattened, times
  sigma, 2 L different images for a pair of sets; mnist/cifar10: x from the first, y from the second.

DIR holds `mnist_10k.npz` (array x_train) and `cifar10_gray_6k.npz` (array x), both `[n, height, width]` uint8. Without
it scikit-learn's bundled digits (8 x 8) stand in for MNIST and 32 x 32 crops of its two photographs for CIFAR-10.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

REGIMES = ("normal", "sphere", "heterogen", "mnist", "cifar10", "mnist/cifar10")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.variance", __doc__)
    parser.add_argument("--images_dir", type=Path, help="folder of the two npz files; default: scikit-learn's images")
    parser.add_argument("--sets", type=int, default=5, help="pairs of sets per regime")
    parser.add_argument("--vectors", type=int, default=1024, help="vectors of a set")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument(
        "--sigmas",
        type=float,
        nargs="+",
        default=[round(0.1 * i, 1) for i in range(1, 11)],
        help="standard deviations, or radii, of queries and keys",
    )
    parser.add_argument(
        "--regimes",
        nargs="+",
        default=list(REGIMES),
        choices=REGIMES,
        metavar="REGIME",
        help="regimes: distributions of queries and keys",
    )
    add_results(parser, "variance")
    arguments = parser.parse_args(argv)
    if arguments.sets < 1 or arguments.vectors < 2 or min(arguments.sigmas) <= 0:
        parser.error("--sets must be at least 1, --vectors at least 2 and all of --sigmas positive")
    arguments.sigmas = sorted(arguments.sigmas)
    return arguments
