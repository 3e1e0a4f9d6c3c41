"""Makes an n-gram language model of books."""

from __future__ import annotations

from collections.abc import Sequence

from favor.eval.options.language_model import parse_arguments
from favor.eval.speech.texts import transcripts
from favor.models.speech import normalize_transcript, write_arpa
from favor.train.common.program import program
from favor.train.text.samples import read_text


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the model.

    Raises:
        ValueError: for files that cannot be read, texts without words, or an order out of range.
    """
    arguments = parse_arguments(argv)
    lines = [] if arguments.words is None else read_text(arguments.words).splitlines()
    more = {word for line in lines for word in normalize_transcript(line).split()}
    texts = list(transcripts(arguments.texts))
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    write_arpa(texts, arguments.output_file, arguments.order, more)
    known = {word for text in texts for word in text.split()}
    count = sum(len(text.split()) for text in texts)
    print(
        f"{len(texts)} sentences of {count} words, {len(known)} different ones and {len(more - known)} more, in "
        f"{arguments.output_file}"
    )
    return 0


cli = program("favor.eval.speech.language_model", main)


if __name__ == "__main__":
    cli()
