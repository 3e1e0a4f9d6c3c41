"""How close linear attention is to softmax on a pretrained model, head by head and end to end.

    python -m favor.eval.approximation MODEL --text book.txt --results eval/results
    python -m favor.eval.approximation --text book.txt --length 512 4096 --backends landmark:window=64 favor#:wderf

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) sees real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values; the
error is |output - exact| / |exact|, Frobenius norms over the sequence. Beside them stand two baselines, the mean of the
values and exact attention inside the window with nothing outside, and diagnostics: rho and the norms of x and y. End to
end, the whole model runs with the backend in every layer: cosine of mean-pooled embeddings to the exact ones, masked-LM
loss or perplexity, as the model has it. `--data_dir GLUE` adds the Spearman correlation on STS-B. `--converted DIR ...`
adds checkpoints from `favor.train.distill` or `favor.convert`, made from MODEL.

Several lengths give a table by length. Where a sample has more tokens than the model has positions, the positions
repeat, so that tokens keep the statistics of those the model knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.pretrained import PACKAGE
from favor.train.common.program import Parser

COMPARED = ("favor+", "favor++", "favor#:saderf", "favor#:sderf", "favor#:cderf", "favor#:wderf")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = Parser("favor.eval.approximation", __doc__, abbreviations=True)
    parser.add_argument("model", nargs="?", help=f"folder or hub name; default: the BERT in the package {PACKAGE}")
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    parser.add_argument("--length", nargs="+", type=int, default=[512], help="tokens of a sample; several are compared")
    parser.add_argument(
        "--position_period",
        type=int,
        help="position of token i is i modulo this; default: the positions of the model, if a sample has more tokens",
    )
    parser.add_argument(
        "--query_samples",
        type=int,
        default=1024,
        help="errors are measured on at most so many queries of a sample; backends compute all",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="what is compared; options given here replace the lists below",
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[64, 128, 256],
        help="random features, or landmarks, per head; several are compared",
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks; 0 for none")
    parser.add_argument("--selected_keys", nargs="+", type=int, default=[], help="of landmarks; several are compared")
    parser.add_argument("--converted", nargs="*", default=[], help="checkpoints made from MODEL")
    parser.add_argument("--data_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    parser.add_argument("--sts_pairs", type=int, help="so many pairs of STS-B; default all")
    parser.add_argument("--seed", type=int, default=0, help="of random directions and masks")
    parser.add_argument("--results", type=Path, default=Path("eval/results"), help="folder of the results")
    parser.add_argument("--name", default="approximation", help="file name of the results, without ending")
    arguments = parser.parse_args(argv)
    arguments.length = sorted(set(arguments.length))
    numbers = (*arguments.length, arguments.samples, arguments.query_samples)
    if min(numbers) < 1 or (arguments.position_period is not None and arguments.position_period < 1):
        parser.error("--length, --samples, --query_samples and --position_period must be at least 1")
    return arguments
