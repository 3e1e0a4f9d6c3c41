"""Error rates of saved Conformers by the length of the chunks that they hear, and the curves of their trainings.

    python -m favor.eval.chunks out/whole out/chunks --data_dir LibriSpeech --eval_splits dev test

The models are folders of `favor.train.asr`. Each transcribes whole utterances, and chunks of each length, by greedy
search. In chunks a frame sees its chunk and those before it, which is what a stream with these chunks computes. From
`all_results.json` of each folder come the command of its training, and loss and error rates by steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.chunks", __doc__)
    add = parser.add_argument
    parser.add_place("model_name_or_path", "models", "folder of a Conformer that favor.train.asr has saved", nargs="+")
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--eval_splits", nargs="+", default=["dev"], help="splits to transcribe")
    add("--chunk_seconds", type=float, nargs="*", default=[0.32, 0.64, 1.28], metavar="S", help="lengths of a chunk")
    add("--left_chunks", type=int, help="chunks that are seen before each chunk, with exact attention; default: all")
    add("--max_eval_samples", type=int, help="utterances per split, evenly spaced; default: all")
    add_results(parser, "chunks")
    arguments = parser.parse_args(argv)
    names = [Path(model).resolve().name for model in arguments.models]
    if len(set(names)) < len(names):
        parser.error(f"the folders of the models must have different names, got {', '.join(names)}")
    return arguments
