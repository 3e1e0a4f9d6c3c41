"""Makes an n-gram language model of books, for the beam search of CTC.

    python -m favor.eval.speech.language_model --texts novel.txt --order 3 --output_file lm.arpa

Sentences become transcripts as LibriSpeech writes them, in capitals. Words of `--words`, one on each line, are known as
well, though they are improbable: names and rare words that the texts lack. Counts are in memory, for some million words
of text; for more use KenLM's program lmplz.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from favor.models.speech import normalize_transcript, write_arpa
from favor.train.common.program import Parser, program
from favor.train.text.samples import read_text

# As transcripts of LibriSpeech write what is said.
SAID = {"Mr": "mister", "Mrs": "missus", "Dr": "doctor", "St": "saint", "Messrs": "messieurs"}
END = re.compile(r"(?<=[.!?;])[\"'\u201d\u2019)\]]*\s+|\n\s*\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.language_model", __doc__)
    add = parser.add_argument
    add("--texts", type=Path, nargs="+", required=True, help="files of text in UTF-8, .txt or .xz")
    add("--order", type=int, default=3, help="words of the longest n-grams, 2 to 6")
    add("--words", type=Path, help="file of more words, one on each line")
    add("--output_file", type=Path, required=True, help="ARPA file to write")
    return parser.parse_args(argv)


def transcripts(texts: Sequence[Path]) -> Iterator[str]:
    """Gives the sentences of files, and the parts between semicolons, as transcripts in capitals."""
    for path in texts:
        full = re.sub(rf"\b({'|'.join(SAID)})\b\.?", lambda found: SAID[found[1]].capitalize(), read_text(path))
        yield from filter(None, map(normalize_transcript, END.split(full)))


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the model."""
    arguments = parse_arguments(argv)
    lines = [] if arguments.words is None else read_text(arguments.words).splitlines()
    more = {word for line in lines for word in normalize_transcript(line).split()}
    texts = list(transcripts(arguments.texts))
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    write_arpa(texts, arguments.output_file, arguments.order, more)
    words = [word for text in texts for word in text.split()]
    print(
        f"{len(texts)} sentences of {len(words)} words, {len({*words})} different ones and {len(more - {*words})} "
        f"more, in {arguments.output_file}"
    )
    return 0


cli = program("favor.eval.speech.language_model", main)


if __name__ == "__main__":
    cli()
