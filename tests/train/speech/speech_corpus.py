"""Small corpora of made-up speech."""

import io
import json
import re
import tarfile

import numpy as np
import soundfile
from speech import write_chapter
from tiny_speech import RATE, sound

WORDS = ("BAT", "COT", "DO", "EAR", "FIN", "GO", "HER", "IT'S")


def transcript(number):
    """One to four words."""
    source = np.random.default_rng(number)
    return " ".join(source.choice(WORDS, source.integers(1, 5)))


def write_sound(path, seconds, seed=0, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound(seconds, seed, rate), rate)
    return path


def librispeech(folder, split="dev", ending=".flac", lengths=(1.0, 0.8, 1.2, 0.7), speakers=(7, 12)):
    """A corpus in LibriSpeech's layout: two speakers, a chapter each, half of the utterances in each."""
    for place, speaker in enumerate(speakers):
        numbers = range(place, len(lengths), 2)
        said = [(number, transcript(number), sound(lengths[number], number)) for number in numbers]
        write_chapter(folder, split, speaker, 100 + speaker, said, ending)
    return folder


def rows(folder, number=3, ending="wav"):
    """Audio files and the rows of a manifest for them."""
    for row in range(number):
        write_sound(folder / "audio" / f"{row}.{ending}", 0.5 + 0.1 * row, row)
    return [{"audio": f"audio/{row}.{ending}", "text": transcript(row)} for row in range(number)]


def assert_told(told, expected):
    """The reason of each name, and of no other, has the words that are expected."""
    assert told.keys() == expected.keys()
    for name, words in expected.items():
        assert re.search(words, told[name])


def write_manifest(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_shard(path, members, form=tarfile.USTAR_FORMAT):
    """A tar file of (name, bytes) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def members(utterances, told=True):
    """Audio with a JSON file, or with a text alone."""
    pairs = []
    for one in utterances:
        row = {"text": one.text, "id": one.id, "speaker": one.speaker, "chapter": one.chapter, "seconds": one.seconds}
        text = (".json", json.dumps(row)) if told else (".txt", one.text + "\n")
        pairs += [(one.id + ".flac", one.audio.read_bytes()), (one.id + text[0], text[1].encode())]
    return pairs
