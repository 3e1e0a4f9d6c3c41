"""One cell of `favor.eval.long_form`: a recording, a model, and their time and memory in a process of their own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import favor
from favor.eval.common.launch import Backend
from favor.eval.speed import measure as speed_measure
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
from favor.models.speech import ConformerProcessor, ctc_greedy
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.transcribe import transcribe
from favor_command.saved import load_model, load_processor

RATE = 16000
# These do what the environment variables of favor.eval.speed.measure do. They slow passes, which are then not timed.
_RELEASE_EARLY = ((-1, 1 << 16), (-3, 1 << 16))  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


@dataclass(frozen=True)
class Recording:
    """Audio of some minutes: utterances one after another, or noise.

    Args:
        seconds: length.
        utterances: the utterances, in order. Default none: noise.
        seed: draws the noise.
    """

    seconds: float
    utterances: tuple[Utterance, ...] = ()
    seed: int = 0

    def samples(self) -> np.ndarray:
        """Gives the samples, `[n]` float32 at 16 kHz."""
        if not self.utterances:
            source = np.random.default_rng(self.seed)
            return 0.1 * source.standard_normal(round(self.seconds * RATE), dtype=np.float32)
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
    """The model of all cells.

    Args:
        preset: size of a new model with random weights.
        model_name_or_path: a trained model in its place. Default None.
        num_features: random features per head of the FAVOR backends. Default 128.
        seed: draws random weights and features. Default 0.
        threads: threads of a process. Default 1.
    """

    preset: str = "small"
    model_name_or_path: str | None = None
    num_features: int = 128
    seed: int = 0
    threads: int = 1

    def build(self, backend: Backend) -> ConformerForCTC:
        """Makes the model in evaluation mode, with equal weights for every backend."""
        torch.manual_seed(self.seed)
        name = backend.name
        if self.model_name_or_path is not None:
            exact = {"dtype": torch.float32, "attn_implementation": name}
            model = load_model(ConformerForCTC, self.model_name_or_path, **exact)
        else:
            model = ConformerForCTC(ConformerConfig.preset(self.preset, attn_implementation=name))
        if name in favor.BACKENDS:
            options: dict[str, Any] = {"features": backend.features} if backend.features else {}
            if self.model_name_or_path is None:
                options["seed"] = self.seed  # a trained model keeps its own directions
            number = backend.num_features or self.num_features
            favor.configure(model, num_features=number, exact_below=0, **options)
        return model.eval()

    def extractor(self) -> ConformerFeatureExtractor:
        """Gives the model's feature extractor."""
        if self.model_name_or_path is None:
            return ConformerFeatureExtractor()
        return load_processor(self.model_name_or_path, ConformerFeatureExtractor)


@torch.inference_mode()
def check(setup: Setup, backends: Sequence[Backend], recording: Recording) -> dict[str, Any]:
    """Compares the logits of the backends for one recording.

    Args:
        setup: the model.
        backends: the backends.
        recording: the audio.

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
    model(**extractor(Recording(1.0).samples(), sampling_rate=RATE))
    speed_measure.warm_libraries()
    return model, extractor


@torch.inference_mode()
def measure_time(setup: Setup, backend: Backend, recording: Recording, repeats: int) -> dict[str, Any]:
    """Measures the seconds of features and of one pass over a recording, medians of wall-clock and processor time.

    Args:
        setup: the model.
        backend: the attention.
        recording: the audio.
        repeats: number of passes.

    Returns:
        "frames" L; "features" and "pass" with "seconds" and "cpu_seconds"; for a trained model "text".

    Raises:
        ArithmeticError: if a logit is not finite.
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

    Args:
        setup: the model.
        backend: the attention.
        recording: the audio.

    Returns:
        "features" and "pass": by how much each raises the resident memory, without its inputs; "total": the peak
        above the loaded model, audio included; "resident": the peak of the process.
    """
    for setting in _RELEASE_EARLY:
        ctypes.CDLL(None).mallopt(*setting)
    model, extractor = _ready(setup, backend)
    _settle()
    loaded = _resident()
    audio = recording.samples()
    inputs, features, first = _peak(lambda: extractor(audio, sampling_rate=RATE))
    _, forward, second = _peak(lambda: model(**inputs).logits)
    resident = max(first, second)
    return {"features": features, "pass": forward, "total": resident - loaded, "resident": resident}


def transcripts(setup: Setup, backend: Backend, utterances: Sequence[Utterance]) -> list[str]:
    """Transcribes utterances one by one with a trained model.

    Args:
        setup: the model.
        backend: the attention.
        utterances: the utterances.
    """
    model, extractor, tokenizer = setup.build(backend), setup.extractor(), _tokenizer(setup)
    batches = (extractor(read_audio(utterance, RATE), sampling_rate=RATE) for utterance in utterances)
    return [transcribe(model, batch, tokenizer)[0] for batch in batches]


def _tokenizer(setup: Setup) -> Any:
    return load_processor(str(setup.model_name_or_path), ConformerProcessor).tokenizer


def _settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak(call: Callable[[], Any]) -> tuple[Any, int, int]:
    """Calls a function; gives its result, the bytes by which resident memory rises, and the peak of resident memory."""
    results: list[Any] = []
    _settle()
    before = _resident()
    growth = speed_measure.resident_peak(lambda: results.append(call()))
    return results[0], growth, before + growth


@dataclass(frozen=True)
class Failure:
    """The reason why a process has no result."""

    reason: str


def isolated(limit: float | None, threads: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `task(*arguments)` in a fresh process; gives its result or a `Failure`.

    The process is forked from one that has imported everything and computed nothing.

    Args:
        limit: bytes by which its address space may grow beyond that of the imported libraries; None: no limit.
        threads: threads of torch.
        task: a function; the function, its arguments and its result must be picklable, its result without tensors.
        *arguments: arguments of `task`.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, limit, threads, task, arguments))
    process.start()
    send.close()
    with receive:
        try:
            answer = receive.recv()
        except EOFError:
            answer = None
    process.join()
    if answer is None:
        killed = " (killed, as the system does when it has no memory left)" if process.exitcode == -9 else ""
        return Failure(f"the process ended with code {process.exitcode}{killed} and no answer")
    return answer


def _answer(send: Connection, limit: float | None, threads: int, task: Callable[..., Any], arguments: tuple) -> None:
    """Runs the task in the forked process and sends its answer.

    Args:
        send: takes the answer.
        limit: bytes by which the address space may grow; None: no limit.
        threads: threads of torch.
        task: a function.
        arguments: its arguments.
    """
    torch.set_num_threads(threads)
    former = resource.getrlimit(resource.RLIMIT_AS)
    if limit is not None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(limit), former[1]))
    try:
        answer = task(*arguments)
    except Exception as error:
        answer = Failure(_reason(error))
    resource.setrlimit(resource.RLIMIT_AS, former)
    send.send(answer)
    send.close()


def _reason(error: Exception) -> str:
    text = str(error)
    # "could not create a primitive" is the message of oneDNN if it gets no memory.
    if isinstance(error, MemoryError) or re.search("DefaultCPUAllocator|could not create a primitive", text):
        wanted = re.search(r"allocate (\d+) bytes", text)
        return "out of memory" + (f": no {int(wanted[1]) / 1e6:.4g} MB were left" if wanted else "")
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"


def available() -> str | None:
    """Says why nothing can be measured on this machine; None if it can."""
    if not hasattr(os, "fork"):
        return "processes with a limit of memory need Linux"
    return speed_measure.MemoryServer.problem()
