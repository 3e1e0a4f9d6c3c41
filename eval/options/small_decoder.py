"""Make a small LLaMA with random weights and a tokenizer for one text, to be trained by `favor.train.clm`.

    python -m favor.eval.small_decoder --text book.txt.xz --output_dir start

No pretrained decoder comes with a package, so the figures for decoders are of one that is trained from here on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the program; raises SystemExit for bad ones, as argparse does."""
    parser = Parser("favor.eval.small_decoder", __doc__, abbreviations=True)
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder of the results")
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--hidden_size", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--key_heads", type=int, default=2, help="heads of keys and values")
    parser.add_argument("--positions", type=int, default=8192, help="longest sequence")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    return parser.parse_args(argv)
