"""Recordings of speech, and the audio encoder that hears them."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, PreTrainedModel

from favor.eval import whisper
from favor.eval.approximation import model as whole
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import Variant
from favor.eval.speech.whisper_convert import PACKAGE
from favor.train.common.pretrained import load_exact
from favor.train.speech.data import read_audio
from favor.train.speech.loaders import encoder_of
from favor.train.speech.sources import load_speech
from favor_command.saved import load_processor


class Recordings:
    """Recordings of `--audio_dir`, in lengths of `--seconds`, and the encoder of the model that hears them."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.sizes = arguments, arguments.seconds
        self.frames: list[int] = []
        if arguments.model is None:
            model, processor = whisper.load(None)
            self.extractor: Any = processor.feature_extractor
        else:
            model = load_exact(arguments.model)
        model.set_attn_implementation("sdpa")
        self.model = encoder_of(model).to(device).eval()
        if arguments.model is not None:
            self.extractor = load_processor(arguments.model, AutoFeatureExtractor)

    def measured(
        self, size: float, found: Sequence[Variant], others: Mapping[Variant, PreTrainedModel] | None = None
    ) -> Measured:
        """Measures variants on recordings of one length."""
        inputs = self._inputs(self.arguments.split, size)
        outputs = partial(whole.embeddings, inputs=inputs)
        options = {"seed": self.arguments.seed, "query_samples": self.arguments.query_samples}
        measured = whole.measure_inputs(self.model, inputs, found, outputs, others=others, **options)
        if measured.length in self.frames:
            raise ValueError(
                f"this encoder makes {measured.length} frames of recordings of any length: give one --seconds"
            )
        self.frames.append(measured.length)
        return measured

    def inputs_to_choose(self) -> list[dict[str, Tensor]]:
        """Makes arguments of the model from the recordings of the split `--choose_on`, in the greatest length."""
        return self._inputs(self.arguments.choose_on, self.sizes[-1])

    def facts(self, measured: Sequence[Measured]) -> dict[str, Any]:
        """Describes model and recordings in words."""
        arguments = self.arguments
        name = Path(arguments.model).name if arguments.model else f"Whisper tiny.en of the PyPI package {PACKAGE}"
        where = f"{arguments.split} of " if arguments.split else ""
        lengths = ", ".join(f"{size:g}" for size in self.sizes)
        where_chosen = f"{arguments.samples} recordings of {arguments.choose_on}, {self.sizes[-1]:g} seconds"
        chosen = {"settings chosen on": where_chosen} if arguments.choose_on else {}
        return {
            "model": f"{name}, its encoder ({type(self.model).__name__})",
            "audio": f"{measured[0].samples} recordings of {lengths} seconds of speech, {where}"
            f"{Path(arguments.audio_dir).resolve().name}; {', '.join(map(str, self.frames))} frames",
            **chosen,
        }

    def _inputs(self, split: str | None, seconds: float) -> list[dict[str, Tensor]]:
        rate, name = self.extractor.sampling_rate, self.model.main_input_name
        longest = getattr(self.extractor, "n_samples", None)  # of a Whisper
        if longest is not None and seconds * rate > longest:
            raise ValueError(f"--seconds must be at most {longest / rate:g}, which is what the processor takes")
        sounds = recordings(self.arguments.audio_dir, split, seconds, self.arguments.samples, rate)
        read = (self.extractor(sound, sampling_rate=rate, return_tensors="pt")[name] for sound in sounds)
        return [{name: features.to(self.model.device)} for features in read]


def recordings(folder: str, split: str | None, seconds: float, number: int, rate: int) -> list[np.ndarray]:
    """Reads recordings of equal length; speakers take turns. Raises ValueError if there are fewer than `number`.

    Consecutive utterances of a chapter are joined until they are as long, and the rest is cut off. The split is None
    for a folder of audio files or with one manifest.
    """
    utterances = load_speech(folder, split, sampling_rate=rate, transcripts=split is not None)[0]
    before: Counter[str | None] = Counter()
    turns: list[tuple[int, int, whisper.Piece]] = []
    for piece in whisper.cut(utterances, seconds, math.inf, number):
        speaker = piece.utterances[0].speaker
        turns.append((before[speaker], len(turns), piece))
        before[speaker] += 1
    if len(turns) < number:
        raise ValueError(f"--samples must be at most {len(turns)}: there are no more recordings of {seconds:g} seconds")
    chosen = [piece for _, _, piece in sorted(turns)[:number]]
    length = round(seconds * rate)
    return [np.concatenate([read_audio(each, rate) for each in piece.utterances])[:length] for piece in chosen]
