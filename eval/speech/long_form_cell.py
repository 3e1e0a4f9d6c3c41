"""Recordings, and the Conformer of `favor.eval.long_form` and `favor.eval.streaming`; what is measured in a process."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import favor
from favor.eval.common.isolated import release_early, resident, resident_peak, warm_libraries
from favor.eval.common.launch import Backend
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
from favor.models.speech import ConformerProcessor, ctc_greedy
from favor.train.speech.arguments import SIZES
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.transcribe import transcribe
from favor_command.saved import load_model, load_processor

RATE = 16000
SEED = 0


def noise(seconds: float, seed: int = SEED) -> np.ndarray:
    """Draws noise, `[n]` float32 at 16 kHz."""
    return 0.1 * np.random.default_rng(seed).standard_normal(round(seconds * RATE), dtype=np.float32)


@dataclass(frozen=True)
class Recording:
    """Audio of some minutes: utterances one after another, or noise."""

    seconds: float
    utterances: tuple[Utterance, ...] = ()

    def samples(self) -> np.ndarray:
        """Gives the samples, `[n]` float32 at 16 kHz."""
        if not self.utterances:
            return noise(self.seconds)
        read = {utterance.id: read_audio(utterance, RATE) for utterance in self.utterances}
        return np.concatenate([read[utterance.id] for utterance in self.utterances])

    @property
    def text(self) -> str:
        """Gives the transcript of the recording."""
        return " ".join(utterance.text for utterance in self.utterances)

    @property
    def repeated(self) -> bool:
        """Whether an utterance comes more than once."""
        return len({utterance.id for utterance in self.utterances}) < len(self.utterances)

    @classmethod
    def of(cls, utterances: Sequence[Utterance], seconds: float) -> Recording:
        """Takes the first utterances until they last `seconds` together; if there are too few, repeats them."""
        if not sum(utterance.seconds or 0.0 for utterance in utterances) > 0:
            raise ValueError("utterances must have lengths: prepare them first.")
        chosen: list[Utterance] = []
        length = 0.0
        while length < seconds:
            chosen.append(utterances[len(chosen) % len(utterances)])
            length += chosen[-1].seconds or 0.0
        return cls(length, tuple(chosen))


@dataclass(frozen=True)
class Setup:
    """The model of all cells."""

    preset: str = "small"
    model_name_or_path: str | None = None
    num_features: int = 128
    threads: int = 1
    causal: bool = False

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Adds the options that `of` reads."""
        add = parser.add_argument
        add("--preset", choices=SIZES, default="small", help="size of a model with random weights")
        add("--model_name_or_path", help="a trained ConformerForCTC in place of the preset")
        add("--num_features", type=int, default=128, help="random features per head of the FAVOR backends")
        add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads; default: those of torch")

    @classmethod
    def of(cls, arguments: argparse.Namespace, causal: bool = False) -> Setup:
        """Takes the values of the options."""
        given = {field.name: getattr(arguments, field.name) for field in fields(cls) if field.name != "causal"}
        return cls(**given, causal=causal)

    def build(self, backend: Backend) -> ConformerForCTC:
        """Makes the model in evaluation mode, with equal weights for every backend."""
        torch.manual_seed(SEED)
        name = backend.name
        options: dict[str, Any] = {"features": backend.features} if backend.features else {}
        if self.model_name_or_path is not None:
            exact = {"dtype": torch.float32, "attn_implementation": name}
            model = load_model(ConformerForCTC, self.model_name_or_path, **exact)
        else:
            config = ConformerConfig.preset(self.preset, causal=self.causal, attn_implementation=name)
            model, options["seed"] = ConformerForCTC(config), SEED  # a trained model keeps its own directions
        if name in favor.BACKENDS:
            number = backend.num_features or self.num_features
            favor.configure(model, num_features=number, exact_below=0, **options)
        return model.eval()

    def extractor(self) -> ConformerFeatureExtractor:
        """Loads the feature extractor of a trained model; that of a new causal model knows mean and size of noise."""
        if self.model_name_or_path is not None:
            return load_processor(self.model_name_or_path, ConformerFeatureExtractor)
        return ConformerFeatureExtractor.measured([noise(10.0, 1)]) if self.causal else ConformerFeatureExtractor()

    def facts(self) -> dict[str, Any]:
        """Gives the settings for a result."""
        new = self.model_name_or_path is None
        return {"seed": SEED, "preset": self.preset if new else None, "num_features": self.num_features}

    @property
    def label(self) -> str:
        """Describes the model in words."""
        return f"preset {self.preset}, random weights" if self.model_name_or_path is None else "a trained model"

    @property
    def folders(self) -> list[str]:
        """Names the option that a result must not show, because it is a folder of this machine."""
        return ["--model_name_or_path"] if self.model_name_or_path and Path(self.model_name_or_path).is_dir() else []


@torch.inference_mode()
def check(setup: Setup, backends: Sequence[Backend], recording: Recording) -> dict[str, Any]:
    """Compares the logits of the backends for one recording.

    Returns:
        "finite" by backend; "difference", the greatest between sdpa and eager, None unless both are compared;
        "distance", |logits - those of sdpa| / |those of sdpa| by backend, None without sdpa.
    """
    inputs = setup.extractor()(recording.samples(), sampling_rate=RATE)
    logits = {backend.label: setup.build(backend)(**inputs).logits for backend in backends}
    exact = logits.get("sdpa")
    both = exact is not None and "eager" in logits
    return {
        "finite": {label: bool(found.isfinite().all()) for label, found in logits.items()},
        "difference": (logits["eager"] - exact).abs().max().item() if both else None,
        "distance": {
            label: None if exact is None else ((found - exact).norm() / exact.norm()).item()
            for label, found in logits.items()
        },
    }


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    """Calls a function several times; gives the last result, and medians of wall-clock and processor seconds."""
    walls, own = [], []
    result = None
    for _ in range(repeats):
        del result
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        walls.append(time.perf_counter() - wall)
        own.append(time.process_time() - cpu)
    return result, {"seconds": statistics.median(walls), "cpu_seconds": statistics.median(own)}


def _ready(setup: Setup, backend: Backend) -> tuple[ConformerForCTC, ConformerFeatureExtractor]:
    """Makes model and feature extractor and runs one short pass, so that libraries have their buffers."""
    model, extractor = setup.build(backend), setup.extractor()
    model(**extractor(noise(1.0), sampling_rate=RATE))
    warm_libraries()
    return model, extractor


@torch.inference_mode()
def measure_time(setup: Setup, backend: Backend, recording: Recording, repeats: int) -> dict[str, Any]:
    """Measures the seconds of features and of one pass over a recording, medians of wall-clock and processor time.

    Returns:
        "frames" L; "features" and "pass" with "seconds" and "cpu_seconds"; for a trained model "text".
    """
    model, extractor = _ready(setup, backend)
    audio = recording.samples()
    inputs, features = timed(lambda: extractor(audio, sampling_rate=RATE), repeats)
    logits, forward = timed(lambda: model(**inputs).logits, repeats)
    if not bool(logits.isfinite().all()):
        raise ArithmeticError("logits are not finite")
    found: dict[str, Any] = {"frames": logits.shape[1], "features": features, "pass": forward}
    if setup.model_name_or_path is not None:
        lengths = model.subsampled_lengths(inputs["attention_mask"].sum(-1))
        (tokens,) = ctc_greedy(logits, lengths, blank=model.config.pad_token_id)
        found["text"] = _tokenizer(setup).decode(tokens, group_tokens=False)
    return found


@torch.inference_mode()
def measure_memory(setup: Setup, backend: Backend, recording: Recording) -> dict[str, int]:
    """Measures the peak memory of features and of one pass over a recording, in bytes.

    Returns:
        "features" and "pass": by how much each raises the resident memory, without its inputs; "total": the peak
        above the loaded model, audio included; "resident": the peak of the process.
    """
    release_early()
    model, extractor = _ready(setup, backend)
    loaded = resident()
    audio = recording.samples()
    inputs, features, first = resident_peak(lambda: extractor(audio, sampling_rate=RATE))
    _, forward, second = resident_peak(lambda: model(**inputs).logits)
    peak = max(first, second)
    return {"features": features, "pass": forward, "total": peak - loaded, "resident": peak}


def transcripts(setup: Setup, backend: Backend, utterances: Sequence[Utterance]) -> list[str]:
    """Transcribes utterances one by one with a trained model."""
    model, extractor, tokenizer = setup.build(backend), setup.extractor(), _tokenizer(setup)
    batches = (extractor(read_audio(utterance, RATE), sampling_rate=RATE) for utterance in utterances)
    return [transcribe(model, batch, tokenizer)[0] for batch in batches]


def _tokenizer(setup: Setup) -> Any:
    return load_processor(str(setup.model_name_or_path), ConformerProcessor).tokenizer
