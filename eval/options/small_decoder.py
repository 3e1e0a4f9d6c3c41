"""Make a small LLaMA with random weights and a tokenizer for one text, to be trained by `favor.train.clm`.

    python -m favor.eval.small_decoder --text book.txt.xz --output_dir start

No package has a pretrained decoder, so the results for decoders are of one that starts from these random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.small_decoder", __doc__)
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder of the results")
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--hidden_size", type=int, default=256, help="width of the model")
    parser.add_argument("--num_hidden_layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--num_attention_heads", type=int, default=4, help="attention heads")
    parser.add_argument("--num_key_value_heads", type=int, default=2, help="heads of keys and values")
    parser.add_argument("--max_position_embeddings", type=int, default=8192, help="longest sequence")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    return parser.parse_args(argv)
