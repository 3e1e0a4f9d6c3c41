"""A small corpus that a model can learn: each letter is a tone."""

from pathlib import Path

import numpy as np
import soundfile

from favor.train import distill
from favor.train.speech import loaders
from favor.train.text import distill_data

RATE = 16000
WORDS = ("BAD", "CAB", "DAD", "FACE", "BEAD", "ACE", "FED", "CAFE")
# Settings of a training of a Conformer, with linear and with exact attention, of CTC on a Whisper, and of a Whisper.
CONFORMER = {"preset": "tiny", "tokenizer_type": "char", "attn_implementation": "favor#", "num_features": 16}
CONFORMER |= {"exact_below": 0, "per_device_train_batch_seconds": 8, "max_train_steps": 6, "learning_rate": 2e-3}
EXACT = CONFORMER | {"attn_implementation": "sdpa", "num_features": None, "exact_below": None, "max_train_steps": 4}
HEAD = {"architecture": "ctc", "tokenizer_type": "char", "per_device_train_batch_seconds": 24}
HEAD |= {"max_train_steps": 4, "learning_rate": 2e-3, "encoder_learning_rate": 4e-4}
WHISPER = {"attn_implementation": "favor#", "num_features": 16, "exact_below": 0, "max_train_steps": 4}
WHISPER |= {"per_device_train_batch_seconds": 24, "learning_rate": 4e-4}
# A model to go on from has a size and a tokenizer.
AGAIN = {"preset": None, "tokenizer_type": None}


def tones(text: str, generator: np.random.Generator) -> np.ndarray:
    """About 0.15 s for each letter, the pitch of which says what it is, and silence for a space."""
    parts = []
    for letter in text:
        time = np.arange(int(RATE * generator.uniform(0.13, 0.17))) / RATE
        pitch = 0 if letter == " " else 250 * 1.35 ** (ord(letter) - ord("A"))
        envelope = np.sin(np.pi * np.arange(len(time)) / len(time))
        parts.append(0.3 * envelope * np.sin(2 * np.pi * pitch * time))
    noise = 0.001 * generator.normal(size=sum(map(len, parts)))
    return (np.concatenate(parts) + noise).astype(np.float32)


def few_and_short(monkeypatch, samples: int, seconds: float) -> None:
    """Makes the samples of a distillation on the corpus, which is small, shorter and fewer."""
    monkeypatch.setattr(distill, "CALIBRATION_SAMPLES", samples)
    monkeypatch.setattr(loaders, "JOIN_SECONDS", seconds)
    for module in (loaders, distill_data):
        monkeypatch.setattr(module, "HELD_OUT_SAMPLES", samples)


def write_chapter(root: Path, split: str, speaker: int, chapter: int, said: list, ending: str = ".flac") -> None:
    """LibriSpeech's layout: (number, text, samples) of each utterance."""
    folder, name = root / "LibriSpeech" / split / str(speaker) / str(chapter), f"{speaker}-{chapter}"
    folder.mkdir(parents=True)
    for number, _, samples in said:
        soundfile.write(folder / f"{name}-{number:04d}{ending}", samples, RATE)
    (folder / f"{name}.trans.txt").write_text("".join(f"{name}-{number:04d} {text}\n" for number, text, _ in said))


def write_corpus(root: Path, sizes: dict[str, int], words: tuple[int, int] = (2, 4), seed: int = 0) -> Path:
    """LibriSpeech's layout: splits of so many utterances, one speaker and chapter each."""
    generator = np.random.default_rng(seed)
    for speaker, (split, size) in enumerate(sizes.items(), 1):
        said = []
        for index in range(size):
            text = " ".join(generator.choice(WORDS, size=generator.integers(*words)))
            said.append((index, text, tones(text, generator)))
        write_chapter(root, split, speaker, 7, said)
    return root
