"""Finds the other half: each document's first half is used to find its second half, and the second to find the first.

A model embeds every half alone, as the mean of its last hidden states. The nearest half of all documents by cosine
should be the other half. Nothing is trained. The models have 512 positions, which repeat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, PreTrainedModel

import favor
from favor.eval.approximation.model import placement
from favor.eval.demo.documents import Document
from favor_command.saved import load_model, load_processor

CUT = 512  # positions of the model
HALF, WHOLE = 4096, 8192
# These lengths are timed on TIMED documents; halves are timed on all documents.
LENGTHS, TIMED = (1024, 2048, WHOLE), 2


@dataclass(frozen=True)
class Reader:
    """One way to read a text.

    Attributes:
        label: its name in the table.
        backend: value of `attn_implementation`.
        options: options of the backend.
        cut: number of tokens that are read; None reads all.
    """

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
    """The embeddings that one reader made, and its times.

    Attributes:
        embeddings: of all halves, `[documents, 2, width]`.
        seconds: of each text, by its number of tokens.
    """

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
    """Lets every reader embed both halves of every document, in turns, so that a slow moment slows all readers.

    Args:
        readers: with different labels.
        folder: of the model and its tokenizer.
        documents: to read.
        lengths: other numbers of tokens, timed on the first documents.
        bar: progress bar that advances by one per text; `count` gives its total.
        seed: draws the random features.

    Returns:
        A `Reading` for each label.
    """
    tokenizer = load_processor(str(folder))
    models = {reader.label: reader.load(folder, seed) for reader in readers}
    found: dict[str, list[Tensor]] = {label: [] for label in models}
    seconds: dict[str, dict[int, list[float]]] = {label: {} for label in models}
    for number, document in enumerate(documents):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        half = HALF - 2
        texts = [ids[:half], ids[half : 2 * half]]
        texts += [ids[: length - 2] for length in lengths if number < TIMED]
        for place, text in enumerate(texts):
            for reader in readers:
                start = time.perf_counter()
                hidden = embed(models[reader.label], tokenizer, text[: reader.cut and reader.cut - 2])
                seconds[reader.label].setdefault(len(text) + 2, []).append(time.perf_counter() - start)
                if place < 2:
                    found[reader.label].append(hidden)
                bar.update()
    return {label: Reading(torch.stack(rows).unflatten(0, (-1, 2)), seconds[label]) for label, rows in found.items()}


def count(readers: Sequence[Reader], documents: int, lengths: Sequence[int]) -> int:
    """Counts the texts that `read_all` reads.

    Args:
        readers: with different labels.
        documents: number of documents.
        lengths: other numbers of tokens.
    """
    return len(readers) * (2 * documents + len(lengths) * min(TIMED, documents))


@torch.no_grad()
def embed(model: PreTrainedModel, tokenizer: Any, text: Sequence[int]) -> Tensor:
    """Embeds a text as the mean of its last hidden states, special tokens included, `[width]`.

    Args:
        model: a BERT.
        tokenizer: that of the model.
        text: tokens, without special tokens.
    """
    ids = torch.tensor([[tokenizer.cls_token_id, *text, tokenizer.sep_token_id]])
    places = placement(model, ids.shape[1], CUT)
    return model(input_ids=ids, **places).last_hidden_state.mean(1)[0]
