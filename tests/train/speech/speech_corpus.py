"""Small corpora of made-up speech."""

import io
import json
import tarfile

import numpy as np
import soundfile
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
        chapter = folder / "LibriSpeech" / split / str(speaker) / str(100 + speaker)
        lines = []
        for number in range(place, len(lengths), 2):
            name = f"{speaker}-{100 + speaker}-{number:04d}"
            write_sound(chapter / f"{name}{ending}", lengths[number], number)
            lines.append(f"{name} {transcript(number)}\n")
        (chapter / f"{speaker}-{100 + speaker}.trans.txt").write_text("".join(lines))
    return folder


def rows(folder, number=3, ending="wav"):
    """Audio files and the rows of a manifest for them."""
    for row in range(number):
        write_sound(folder / "audio" / f"{row}.{ending}", 0.5 + 0.1 * row, row)
    return [{"audio": f"audio/{row}.{ending}", "text": transcript(row)} for row in range(number)]


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
