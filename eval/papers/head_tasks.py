"""Three classification problems with a softmax output layer, for `favor.eval.papers.head_optimizer`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from favor.eval.common.pretrained import minilm_path
from favor.eval.papers.datasets import read_images
from favor.integrations.modules import evaluating
from favor.train.text.glue_data import load_glue
from favor.train.text.samples import read_text
from favor_command.saved import load_model, load_processor

WORD = re.compile(r"\w+|[^\w\s]")
UNKNOWN = 0
IMAGES = "fashion_mnist_10k.npz"


@dataclass(frozen=True)
class HeadTask:
    """A network whose last layer is a softmax layer, and its data."""

    name: str
    # Inputs and labels by part: "train", "measured" (the training samples on which the training loss is measured) and
    # "test". Labels are `[n]` or, for every token, `[n, L]`.
    data: Mapping[str, tuple[Tensor, Tensor]]
    build: Callable[[], nn.Module]  # makes a new model, with torch's global generator
    head: str  # name of the output layer in the model, an `nn.Linear`
    logits: Callable[[nn.Module, Tensor], Tensor]  # `[..., labels]` from model and inputs
    batch_size: int
    settings: Mapping[str, Any]  # with the seed, they determine the data and the model
    about: str  # one sentence for the report

    def loss(self, model: nn.Module, rows: Tensor, part: str = "train") -> tuple[Tensor, Tensor]:
        """Computes the mean cross entropy over the labels of some rows, and how many labels have the largest logit."""
        inputs, labels = (values[rows] for values in self.data[part])
        logits = self.logits(model, inputs).flatten(0, -2)
        right = (logits.detach().argmax(-1) == labels.flatten()).sum()
        return nn.functional.cross_entropy(logits, labels.flatten()), right

    @torch.no_grad()
    def measure(self, model: nn.Module, part: str) -> tuple[float, float]:
        """Computes mean cross entropy and accuracy over a part, in evaluation mode."""
        (_, labels), loss, right = self.data[part], 0.0, 0
        with evaluating(model):
            for rows in torch.arange(len(labels)).split(self.batch_size):
                value, hits = self.loss(model, rows, part)
                loss += value.item() * labels[rows].numel()
                right += int(hits)
        return loss / labels.numel(), right / labels.numel()


def fashion(folder: Path, width: int = 128, batch_size: int = 128) -> HeadTask:
    """Makes the task Fashion-MNIST, 10 labels, with two hidden layers of this width; `folder` holds IMAGES."""
    arrays = read_images(folder, IMAGES, "x_train", "y_train", "x_test", "y_test")
    x, y, x_test, y_test = map(torch.from_numpy, arrays)
    train = (x.flatten(1).float().div(255), y.long())
    number = int(y.max()) + 1

    def build() -> nn.Module:
        layers = [nn.Linear(train[0].shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, number))

    return HeadTask(
        "fashion",
        {"train": train, "measured": train, "test": (x_test.flatten(1).float().div(255), y_test.long())},
        build,
        "4",
        lambda model, rows: model(rows),
        batch_size,
        {"samples": len(y), "width": width, "batch_size": batch_size},
        f"Fashion-MNIST, {len(y)} images, {number} labels, batches of {batch_size}; hidden layers of {width} and "
        f"{width} units with ReLU.",
    )


def sst2(
    folder: Path | None, samples: int = 640, measured: int = 320, test: int = 436, batch_size: int = 32, path: str = ""
) -> HeadTask:
    """Makes the task SST-2, 2 labels, with the pretrained MiniLM as the body and a new classification layer."""
    path = str(path or minilm_path())
    tokenizer = load_processor(path)
    data = load_glue("sst2", folder)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:samples]
    train, dev = data.train.select(order.tolist()), data.evaluation["validation"]
    parts = {}
    for part, rows in (("train", train), ("test", dev.select(range(min(test, len(dev)))))):
        ids = tokenizer(list(rows["sentence"]), truncation=True, max_length=32, padding=True)["input_ids"]
        parts[part] = (torch.tensor(ids), torch.tensor(rows["label"]))
    parts["measured"] = (parts["train"][0][:measured], parts["train"][1][:measured])

    def logits(model: nn.Module, ids: Tensor) -> Tensor:
        mask = ids != tokenizer.pad_token_id
        longest = int(mask.sum(-1).max())
        return model(input_ids=ids[:, :longest], attention_mask=mask[:, :longest]).logits

    return HeadTask(
        "sst2",
        parts,
        lambda: load_model(AutoModelForSequenceClassification, path, num_labels=2),
        "classifier",
        logits,
        batch_size,
        {"samples": len(train), "measured": measured, "test": len(parts["test"][1]), "batch_size": batch_size},
        f"SST-2, {len(train)} sentences drawn once, 2 labels, batches of {batch_size}; pretrained 6-layer MiniLM with "
        f"its dropout. Training loss of {len(parts['measured'][1])} of the sentences.",
    )


def text(
    path: Path,
    tokens: int = 64_000,
    measured: int = 25_600,
    test: int = 12_800,
    vocabulary: int = 8192,
    length: int = 64,
    width: int = 128,
    layers: int = 2,
    batch_size: int = 16,
) -> HeadTask:
    """Makes the task "next word of a text", with a small causal transformer whose output layer is not tied.

    Words are lower-cased; all words that are not among the most frequent ones of the file are one unknown word.
    Training and test samples are spaced evenly over the file, and none overlap.
    """
    words = WORD.findall(read_text(path).lower())
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    number = (tokens + test) // length
    available = (len(words) - 1) // length
    if number > available:
        raise ValueError(f"expected a text of at least {number * length + 1} words, got {len(words)} in {path}.")
    # The first of several samples of a place in the text is a test sample, now and then.
    starts = (torch.arange(number) * available // number * length).tolist()
    rows = torch.tensor([[known.get(word, UNKNOWN) for word in words[i : i + length + 1]] for i in starts])
    rows = rows[torch.randperm(number, generator=torch.Generator().manual_seed(0))]
    held_out, train = rows[: test // length], rows[test // length :]
    split = {"train": train, "measured": train[: measured // length], "test": held_out}
    labels = len(known) + 1
    shape: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": max(1, width // 32), "n_positions": length}
    config = GPT2Config(vocab_size=labels, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, **shape)
    settings = {"file": Path(path).name, "tokens": tokens, "test": test, "measured": measured, "length": length}
    return HeadTask(
        "text",
        {part: (values[:, :-1], values[:, 1:]) for part, values in split.items()},
        lambda: GPT2LMHeadModel(config),
        "lm_head",
        lambda model, ids: model(input_ids=ids, use_cache=False).logits,
        batch_size,
        {**settings, "labels": labels, "width": width, "layers": layers, "batch_size": batch_size},
        f"Next word of novels, {train[:, 1:].numel()} words, {labels} labels, batches of {batch_size} x {length}; "
        f"{layers}-layer causal transformer of width {width} from scratch, untied output layer. Training loss of "
        f"{split['measured'][:, 1:].numel()} of the words.",
    )
