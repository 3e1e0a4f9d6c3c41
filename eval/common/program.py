"""Options that evaluation programs share: the device, and the place of the results."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from favor.eval.common.processes import processes


def device_or_default(given: str | None) -> str:
    """Gives the chosen device, else that of this of several processes, else cuda if there is a GPU, else cpu."""
    state = processes()
    if given is None and state.num_processes > 1:
        return str(state.device)
    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def add_results(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds `--output_dir` and `--name`, the folder of the results and their file name."""
    parser.add_argument("--output_dir", type=Path, default=Path("out/results"), help="folder of the results")
    parser.add_argument("--name", default=name, help="file name of the results, without ending")
