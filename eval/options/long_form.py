"""Whole chapters in one pass of a Conformer: time and peak memory by minutes of audio, linear and exact attention.

    python -m favor.eval.long_form                                            noise, random weights
    python -m favor.eval.long_form --data_dir DATA --split test --model_name_or_path MODEL       and word error rates

Utterances of one speaker's chapters, in order, make one recording. Each cell runs in processes of its own on the CPU,
one for its time and one for its memory. Nothing is timed unless, at the shortest duration, all logits are finite and
those of sdpa and eager agree. A cell that needs too much memory is skipped or fails; the others still run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.launch import Backend
from favor.eval.common.program import add_results
from favor.train.common.program import Parser
from favor.train.speech.arguments import SIZES

EXACT = ("sdpa", "eager")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.long_form", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, nargs="+", default=[1, 2, 5, 10, 20, 60], metavar="M", help="minutes of audio")
    add("--backends", nargs="+", default=["favor#", *EXACT], help="sdpa, eager, favor#, favor+, favor++, favor#:sderf")
    add("--preset", choices=SIZES, default="small", help="size of a model with random weights")
    add("--model_name_or_path", help="a trained ConformerForCTC in place of the preset")
    add("--num_features", type=int, default=128, help="random features per head of the FAVOR backends")
    add("--data_dir", type=Path, help="LibriSpeech's folder or one with manifests; default: noise")
    add("--split", default="test", help="split of the data")
    add("--max_gigabytes", type=float, default=16.0, help="greatest memory of a process, without its libraries")
    add("--max_exact_minutes", type=float, default=20.0, help="longest audio for sdpa and eager")
    add("--repeats", type=int, default=3, help="passes over recordings of up to 2 minutes")
    add("--long_repeats", type=int, default=1, help="passes over longer recordings")
    add("--threads", type=int, help="CPU threads; default: those of torch")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add_results(parser, "long_form_cpu")
    arguments = parser.parse_args(argv)
    import torch

    from favor.eval.speech.long_form_cell import available

    arguments.threads = torch.get_num_threads() if arguments.threads is None else arguments.threads
    try:
        arguments.backends = [Backend.parse(text) for text in dict.fromkeys(arguments.backends)]
    except ValueError as error:
        parser.error(str(error))
    arguments.minutes = sorted(set(arguments.minutes))
    if min(*arguments.minutes, arguments.max_gigabytes, arguments.max_exact_minutes) <= 0:
        parser.error("--minutes, --max_gigabytes and --max_exact_minutes must be positive")
    if min(arguments.repeats, arguments.long_repeats, arguments.threads, arguments.num_features) < 1:
        parser.error("--repeats, --long_repeats, --threads and --num_features must be at least 1")

    if (problem := available()) is not None:
        parser.error(problem)
    return arguments
