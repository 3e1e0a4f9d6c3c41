"""Fine-tunes with exact attention, switches to linear attention by one argument, saves, loads again and evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, AutoTokenizer

import favor
from favor.eval.common.launch import Backend
from favor.eval.common.program import device_or_default
from favor.eval.demo import word_order
from favor.eval.glue.classifier import evaluate, load_samples
from favor.train import glue

# Number of means, of selected keys, and of random features.
NUM_FEATURES = 64
# The training must be short on two cores: it takes 35 to 60 seconds.
BATCH_SIZE, LEARNING_RATE, WARMUP_RATIO = 16, 2e-4, 0.1


@dataclass(frozen=True)
class Switched:
    """A fine-tuned model that was loaded again, and its score.

    Attributes:
        folder: where it was saved.
        accuracy: on the development set.
        runs: the kind of attention of every layer, as `favor.describe` says.
        shortest: tokens of the shortest development sample.
    """

    folder: Path
    accuracy: float
    runs: tuple[str, ...]
    shortest: int


def train(model: Path, data_dir: Path, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Runs `favor.train.glue` with exact attention; returns its results.

    Args:
        model: folder of the pretrained model.
        data_dir: folder of the data.
        folder: of the results.
        steps: number of optimizer steps.
        seed: of the training.
    """
    command: list[object] = ["--model_name_or_path", model, "--attn_implementation", "sdpa"]
    command += ["--task_name", word_order.TASK, "--data_dir", data_dir, "--max_length", word_order.MAX_LENGTH]
    command += ["--max_train_steps", steps, "--per_device_train_batch_size", BATCH_SIZE, "--dropout", 0]
    command += ["--learning_rate", LEARNING_RATE, "--warmup_ratio", WARMUP_RATIO, "--seed", seed]
    command += ["--output_dir", folder, "--overwrite_output_dir"]
    return glue.main([str(word) for word in command])


def switch(trained: Path, results: dict[str, Any], backend: str, seed: int) -> Switched:
    """Loads a trained model with another attention, saves it, loads it again and evaluates it.

    Args:
        trained: folder of the model.
        results: of its training.
        backend: value of `attn_implementation`.
        seed: draws the random features.

    Raises:
        RuntimeError: if the saved model does not come back with the attention it was saved with.
    """
    model = AutoModelForSequenceClassification.from_pretrained(trained, attn_implementation=backend)
    # The texts are short: without exact_below=0, layers would keep exact attention, because it is faster.
    favor.configure(model, **options(backend), exact_below=0, seed=seed)
    folder = trained.parent / Backend(backend).slug
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained).save_pretrained(folder)

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    if model.config._attn_implementation != backend:
        raise RuntimeError(f"{folder} was saved with {backend} and came back with {model.config._attn_implementation}")
    model.to(device_or_default(None)).eval()
    data_dir, max_length = results["arguments"]["data_dir"], word_order.MAX_LENGTH
    samples = load_samples(str(folder), word_order.TASK, data_dir, max_length=max_length)
    accuracy, shortest = evaluate(model, samples, backend).metrics["accuracy"], samples.all_lengths[0]
    layers = favor.describe(model, shortest).layers
    return Switched(folder, accuracy, tuple(layer.runs for layer in layers), shortest)


def options(backend: str) -> dict[str, Any]:
    """Gives the options of a backend in this task."""
    return {"num_features": NUM_FEATURES} | ({"selected_keys": NUM_FEATURES} if backend == "landmark" else {})
