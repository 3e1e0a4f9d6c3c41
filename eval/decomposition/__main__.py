"""The decompositions compared with those of scikit-learn: outliers, KL-NMF, mixture weights, stochastic PCA."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from favor.eval.common import report
from favor.eval.decomposition import mixture as decomposition_mixture
from favor.eval.decomposition import nmf as decomposition_nmf
from favor.eval.decomposition import outliers as decomposition_outliers
from favor.eval.decomposition import pca as decomposition_pca
from favor.eval.decomposition import plots as decomposition_plots
from favor.eval.options.decomposition import parse_arguments
from favor.train.common.program import program

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
    command = report.shown_command("favor.eval.decomposition", words, ["--keel_dir"], ["--output_dir"])
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


cli = program("favor.eval.decomposition", main)


if __name__ == "__main__":
    cli()
