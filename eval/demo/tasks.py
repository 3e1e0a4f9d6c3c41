"""The two tasks of the demo, on passages of novels in the public domain (see text/ORIGIN.md).

1. Each half of a passage is used to find the other half. A model embeds every half alone, as the mean of its last
   hidden states. The nearest half of all by cosine should be the other one. Nothing is trained. The models have 512
   positions, which repeat.
2. Are the words in order? A task in the layout of GLUE's SST-2: label 1 is a passage, label 0 a passage with its words
   shuffled. Every passage comes in both forms, so a model that ignores the order is right in 50 % of the cases.
   Passages of training and development are of different documents. A model is fine-tuned with exact attention,
   switched to linear attention by one argument, saved, loaded again and evaluated.
"""

from __future__ import annotations

import itertools
import lzma
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import favor
from favor.eval.approximation.model import placement
from favor.eval.common.launch import Backend
from favor.eval.common.program import device_or_default
from favor.eval.glue.classifier import evaluate, load_samples
from favor.train import glue
from favor_command.saved import load_model, load_processor

FILE = Path(__file__).parent / "text" / "novels.txt.xz"
# Stands between documents. The first line of a document is "title | author | year".
SEPARATOR = "\f"
CUT = 512  # positions of the model
HALF, WHOLE = 4096, 8192
# These lengths are timed on TIMED documents; halves are timed on all documents.
LENGTHS, TIMED = (1024, 2048, WHOLE), 2
TASK, FOLDER = "sst2", "SST-2"
# 180 words are 206 to 313 tokens, usually 240.
WORDS, MAX_LENGTH = 180, 256
DEV_PASSAGES = 50
# Number of means, of selected keys, and of random features.
NUM_FEATURES = 64
# The training must be short on two cores: it takes 35 to 60 seconds.
BATCH_SIZE, LEARNING_RATE, WARMUP_RATIO = 16, 2e-4, 0.1


class Document(NamedTuple):
    """One passage of a novel, 8,200 word pieces of BERT long."""

    title: str
    author: str
    year: int
    text: str


def documents(number: int | None = None) -> list[Document]:
    """Reads the documents: first one of each novel, then a second one of each, and so on."""
    parts = lzma.decompress(FILE.read_bytes()).decode().split(SEPARATOR)
    if number is not None and not 2 <= number <= len(parts):
        raise ValueError(f"the number of documents must be from 2 to {len(parts)}, got {number}")
    found = []
    for part in parts[:number]:
        head, text = part.split("\n", 1)
        title, author, year = head.split(" | ")
        found.append(Document(title, author, int(year), text))
    return found


@dataclass(frozen=True)
class Reader:
    """One way to read a text."""

    label: str
    backend: str = "sdpa"
    options: dict[str, Any] = field(default_factory=dict)
    cut: int | None = None

    def load(self, folder: Path, seed: int) -> PreTrainedModel:
        """Loads the model with this attention."""
        options = {"attn_implementation": self.backend, "dtype": torch.float32}
        model: PreTrainedModel = load_model(AutoModel, str(folder), **options)
        if self.backend in favor.BACKENDS:
            favor.configure(model, seed=seed, **self.options)
        return model.eval()


@dataclass
class Reading:
    """The embeddings that one reader made, and its times."""

    embeddings: Tensor
    seconds: dict[int, list[float]]

    def accuracy(self) -> float:
        """Computes the fraction of halves whose nearest half is the other one of their document; more is better."""
        first, second = torch.nn.functional.normalize(self.embeddings, dim=-1).unbind(1)
        cosines, own = first @ second.T, torch.arange(len(first))
        return float(torch.cat([cosines.argmax(1) == own, cosines.argmax(0) == own]).float().mean())

    def cosine(self, exact: Reading) -> float:
        """Computes the mean cosine of the embeddings with those of another reading."""
        return float(torch.cosine_similarity(self.embeddings, exact.embeddings, dim=-1).mean())

    def median(self, length: int) -> float:
        """Computes the median seconds of a text of `length` tokens."""
        return statistics.median(self.seconds[length])


def read_all(
    readers: Sequence[Reader], folder: Path, documents: Sequence[Document], lengths: Sequence[int], bar: tqdm, seed: int
) -> dict[str, Reading]:
    """Lets every reader embed both halves of every document, in turns, so that a slow moment slows all readers."""
    tokenizer = load_processor(str(folder))
    models = {reader.label: reader.load(folder, seed) for reader in readers}
    found: dict[str, list[Tensor]] = {label: [] for label in models}
    seconds: dict[str, dict[int, list[float]]] = {label: {} for label in models}
    for number, document in enumerate(documents):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        half = HALF - 2
        texts = [ids[:half], ids[half : 2 * half]]
        texts += [ids[: length - 2] for length in lengths if number < TIMED]
        for (place, text), reader in itertools.product(enumerate(texts), readers):
            start = time.perf_counter()
            hidden = embed(models[reader.label], tokenizer, text[: reader.cut and reader.cut - 2])
            seconds[reader.label].setdefault(len(text) + 2, []).append(time.perf_counter() - start)
            if place < 2:
                found[reader.label].append(hidden)
            bar.update()
    return {label: Reading(torch.stack(rows).unflatten(0, (-1, 2)), seconds[label]) for label, rows in found.items()}


@torch.no_grad()
def embed(model: PreTrainedModel, tokenizer: Any, text: Sequence[int]) -> Tensor:
    """Embeds a text as the mean of its last hidden states, special tokens included, `[width]`."""
    ids = torch.tensor([[tokenizer.cls_token_id, *text, tokenizer.sep_token_id]])
    places = placement(model, ids.shape[1], CUT)
    return model(input_ids=ids, **places).last_hidden_state.mean(1)[0]


def passages(documents: Sequence[Document], number: int, rng: random.Random) -> list[list[str]]:
    """Draws different passages as lists of words."""
    words = [document.text.split() for document in documents]
    found = [text[start : start + WORDS] for text in words for start in range(0, len(text) - WORDS, WORDS)]
    if number > len(found):
        raise ValueError(f"{len(documents)} documents have {len(found)} passages of {WORDS} words, {number} are needed")
    return rng.sample(found, number)


def rows(found: Sequence[Sequence[str]], rng: random.Random) -> list[tuple[str, int]]:
    """Makes sentences and labels: every passage unchanged and shuffled, in random order."""
    pairs = [(" ".join(words), 1) for words in found]
    pairs += [(" ".join(rng.sample(words, len(words))), 0) for words in found]
    rng.shuffle(pairs)
    return pairs


def generate(data_dir: Path, documents: Sequence[Document], train_rows: int, seed: int) -> Path:
    """Writes `SST-2/train.tsv` and `SST-2/dev.tsv`."""
    rng, middle = random.Random(seed), len(documents) // 2
    folder = data_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    parts = (("train", documents[:middle], train_rows // 2), ("dev", documents[middle:], DEV_PASSAGES))
    for split, part, number in parts:
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows(passages(part, number, rng), rng))]
        (folder / f"{split}.tsv").write_bytes(("\n".join(lines) + "\n").encode())
    return data_dir


@dataclass(frozen=True)
class Switched:
    """A fine-tuned model that was loaded again, and its score."""

    folder: Path
    accuracy: float
    runs: tuple[str, ...]
    shortest: int


def train(model: Path, data_dir: Path, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Runs `favor.train.glue` with exact attention on the data of `generate`; returns its results."""
    command: list[object] = ["--model_name_or_path", model, "--attn_implementation", "sdpa"]
    command += ["--task_name", TASK, "--data_dir", data_dir, "--max_length", MAX_LENGTH]
    command += ["--max_train_steps", steps, "--per_device_train_batch_size", BATCH_SIZE, "--dropout", 0]
    command += ["--learning_rate", LEARNING_RATE, "--warmup_ratio", WARMUP_RATIO, "--seed", seed]
    command += ["--output_dir", folder, "--overwrite_output_dir"]
    return glue.main([str(word) for word in command])


def switch(trained: Path, results: dict[str, Any], backend: str, seed: int) -> Switched:
    """Loads a trained model with another attention, saves it, loads it again and evaluates it."""
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
    samples = load_samples(str(folder), TASK, results["arguments"]["data_dir"], max_length=MAX_LENGTH)
    accuracy, shortest = evaluate(model, samples, backend).metrics["accuracy"], samples.all_lengths[0]
    layers = favor.describe(model, shortest).layers
    return Switched(folder, accuracy, tuple(layer.runs for layer in layers), shortest)


def options(backend: str) -> dict[str, Any]:
    """Gives the options of a backend in this task."""
    return {"num_features": NUM_FEATURES} | ({"selected_keys": NUM_FEATURES} if backend == "landmark" else {})
