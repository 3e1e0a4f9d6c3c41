"""Programs `flite` and `espeak-ng`, and a package `piper`, that say every letter as a tone."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

RATES = {"flite": 16000, "espeak-ng": 22050}
PROGRAM = """#!/bin/sh
'''exec' "{python}" "$0" "$@" # the first line of a program cannot hold a path with spaces
'''
import sys
import numpy as np
import soundfile
words = sys.argv[1:]
given = dict(zip(words, words[1:]))
if given.get("-voice", given.get("-v")) == "none":
    sys.exit("there is no such voice")
text = given["-t"] if "-t" in given else given["--"]
length = float(given["--setf"].split("=")[1]) if "--setf" in given else 160 / float(given["-s"])
time = np.arange(round(0.05 * len(text) * length * {rate})) / {rate}
soundfile.write(given.get("-o") or given["-w"], 0.3 * np.sin(2 * np.pi * 440 * time), {rate})
"""


def install(folder: Path, monkeypatch, *names: str) -> None:
    """Puts the programs on the PATH, alone."""
    folder.mkdir(exist_ok=True)
    for name in names:
        path = folder / name
        path.write_text(PROGRAM.format(python=sys.executable, rate=RATES[name]))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def install_piper(monkeypatch) -> list[str]:
    """Makes the packages `piper` and `some_voice`; gives the list of what it was asked to load."""
    loaded: list[str] = []

    class Voice:
        @staticmethod
        def load(path):
            loaded.append(path)
            return Voice()

        def synthesize(self, text, settings):
            for part in text.split(","):
                samples = np.zeros(round(1102 * len(part) * settings.length_scale), np.float32)
                yield SimpleNamespace(audio_float_array=samples, sample_rate=22050)

    piper = ModuleType("piper")
    piper.PiperVoice, piper.SynthesisConfig = Voice, lambda length_scale: SimpleNamespace(length_scale=length_scale)
    voice = ModuleType("some_voice")
    voice.model_path = lambda: Path("voice.onnx")
    monkeypatch.setitem(sys.modules, "piper", piper)
    monkeypatch.setitem(sys.modules, "some_voice", voice)
    return loaded
