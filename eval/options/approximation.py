"""Error of linear attention on a pretrained model, per head and of the whole model.

    python -m favor.eval.approximation MODEL --text book.txt --results eval/results
    python -m favor.eval.approximation --text book.txt --length 512 4096 --backends landmark:window=64 favor#:wderf

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) reads real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values. The
error is |output - exact| / |exact|, Frobenius norms over the sequence; less is better. There are two baselines: the
mean of the values, and exact attention inside the window without keys outside. There are also diagnostics: rho and the
norms of x and y. Then the whole model runs with the backend in every layer. Its score is the cosine of mean-pooled
embeddings with the exact ones, the masked-LM loss or the perplexity, depending on the model. `--data_dir GLUE` adds the
Spearman correlation on STS-B. `--converted DIR ...` adds checkpoints from `favor.train.distill` or `favor.convert`,
made from MODEL.

Several lengths give a table by length. If a sample has more tokens than the model has positions, the positions repeat,
so that tokens keep statistics that the model knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.pretrained import PACKAGE
from favor.train.common.program import Parser

COMPARED = ("favor+", "favor++", "favor#:saderf", "favor#:sderf", "favor#:cderf", "favor#:wderf")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
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
        help="greatest number of queries of a sample whose errors count; backends compute all queries",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends to compare; options given here replace the lists below",
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[64, 128, 256],
        help="random features, or landmarks, per head; several are compared",
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks; 0: no blocks")
    parser.add_argument(
        "--selected_keys", nargs="+", type=int, default=[], help="selected keys of landmarks; several are compared"
    )
    parser.add_argument("--converted", nargs="*", default=[], help="checkpoints made from MODEL")
    parser.add_argument("--data_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    parser.add_argument("--sts_pairs", type=int, help="number of pairs of STS-B; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of random directions and masks")
    parser.add_argument("--results", type=Path, default=Path("eval/results"), help="folder of the results")
    parser.add_argument("--name", default="approximation", help="file name of the results, without ending")
    arguments = parser.parse_args(argv)
    arguments.length = sorted(set(arguments.length))
    numbers = (*arguments.length, arguments.samples, arguments.query_samples)
    if min(numbers) < 1 or (arguments.position_period is not None and arguments.position_period < 1):
        parser.error("--length, --samples, --query_samples and --position_period must be at least 1")
    return arguments
