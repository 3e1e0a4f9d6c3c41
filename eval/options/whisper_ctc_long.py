"""Long recordings by CTC on Whisper's encoder: one pass, windows with overlap, and a stream with look-ahead.

    python -m favor.eval.whisper_ctc_long out/whisper_ctc --data_dir DATA --split dev+test --minutes 10 30

Utterances one after another make a recording. Its text is found in each way, and by utterances alone for comparison: by
greedy search, or among the words of a language model. Each way runs in a process of its own; its seconds are those of
reading the files, features and search, and its memory is the greatest resident memory of the process, with libraries,
model and audio. One pass of exact attention is quadratic in the length, so it has a limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser

WAYS = ("utterances", "windows", "stream", "one pass, local", "one pass, exact", "one pass, landmark")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper_ctc_long", __doc__)
    add = parser.add_argument
    parser.add_place("model_name_or_path", "model", "folder of a model that favor.train.asr has saved")
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--split", default="dev+test", help="split of the data; several are joined by +")
    add("--minutes", type=float, nargs="+", default=[10.0, 30.0], metavar="M", help="minutes of audio")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the text is found")
    add("--language_model", type=Path, help="ARPA file or binary file of KenLM; default: greedy search")
    add("--lm_weight", type=float, default=0.7, help="weight of the language model")
    add("--word_score", type=float, default=0.0, help="score of each word")
    add("--lexicon", type=Path, help="pronunciations for a model of phonemes; default: those in its folder, if any")
    add("--step", type=float, default=1.0, help="seconds of a step of the stream")
    add("--look_ahead", type=float, default=1.0, help="seconds that the stream looks ahead")
    add("--context", type=float, default=10.0, help="seconds that the stream looks back")
    add("--sliding_window", type=int, default=375, help="frames before and after each that local attention sees")
    add("--num_features", type=int, default=256, help="means of landmarks per head")
    add("--selected_keys", type=int, help="keys that landmarks read exactly; default: those of the method")
    add("--max_exact_minutes", type=float, default=10.0, help="longest recording for one pass of exact attention")
    add("--threads", type=int, default=1, help="CPU threads")
    add_results(parser, "whisper_ctc_long")
    arguments = parser.parse_args(argv)
    arguments.minutes = sorted(set(arguments.minutes))
    positive = (*arguments.minutes, arguments.num_features, arguments.sliding_window, arguments.threads)
    if min(positive) <= 0:
        parser.error("--minutes, --num_features, --sliding_window and --threads must be positive")
    return arguments
