"""A small corpus that a model can learn: each letter is a tone."""

from pathlib import Path

import numpy as np
import soundfile

RATE = 16000
WORDS = ("BAD", "CAB", "DAD", "FACE", "BEAD", "ACE", "FED", "CAFE")


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


def write_corpus(root: Path, sizes: dict[str, int], words: tuple[int, int] = (2, 4), seed: int = 0) -> Path:
    """LibriSpeech's layout: splits of so many utterances, one speaker and chapter each."""
    generator = np.random.default_rng(seed)
    for number, (split, size) in enumerate(sizes.items()):
        folder = root / "LibriSpeech" / split / f"{number + 1}" / "7"
        folder.mkdir(parents=True)
        lines = []
        for index in range(size):
            text = " ".join(generator.choice(WORDS, size=generator.integers(*words)))
            name = f"{number + 1}-7-{index:04d}"
            soundfile.write(folder / f"{name}.flac", tones(text, generator), RATE)
            lines.append(f"{name} {text}")
        (folder / f"{number + 1}-7.trans.txt").write_text("\n".join(lines) + "\n")
    return root
