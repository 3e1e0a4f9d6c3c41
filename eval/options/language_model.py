"""Makes an n-gram language model of books, for the beam search of CTC.

    python -m favor.eval.speech.language_model --texts novel.txt --order 3 --output_file lm.arpa

Sentences become transcripts as LibriSpeech writes them, in capitals. Words of `--words`, one on each line, are known as
well, though they are improbable: names and rare words that the texts lack. Counts are in memory, for some million words
of text; for more use KenLM's program lmplz.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.language_model", __doc__)
    add = parser.add_argument
    add("--texts", type=Path, nargs="+", required=True, help="files of text in UTF-8, .txt or .xz")
    add("--order", type=int, default=3, help="words of the longest n-grams, 2 to 6")
    add("--words", type=Path, help="file of more words, one on each line")
    add("--output_file", type=Path, required=True, help="ARPA file to write")
    return parser.parse_args(argv)
