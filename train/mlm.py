"""Go on with the pre-training of a masked language model, with exact or FAVOR attention.

    accelerate launch -m favor.train.mlm --model_name_or_path bert-base-uncased --train_file book.txt \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/adapted

A model that was trained with softmax attention adapts to its estimate this way before it is fine-tuned, as the papers'
models were pre-trained with the attention they are fine-tuned with. Text is cut into samples of equal length; which of
their tokens are masked changes with every epoch. `--head_optimizer softmax_bound` and `--untie_head` give the output
layer weights of its own. The output folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, PreTrainedModel

import favor
from favor.models.bert import PerformerBertForMaskedLM
from favor.train import checkpoint, loop, report
from favor.train.arguments import (
    DEFAULT_SEED,
    SOFTMAX_BOUND,
    ArgumentGroups,
    BatchedRunArguments,
    HeadArguments,
    ModelArguments,
    check_positive,
    option,
)
from favor.train.batches import EpochSampler, mix
from favor.train.optimizers import make_optimizer
from favor.train.pretrained import check_positions, load_switched, load_tokenizer
from favor.train.text import samples


@dataclass(kw_only=True)
class TextArguments:
    """The text, how it is masked, and the output layer."""

    train_file: str = field(metadata={"help": "Text to learn from: UTF-8, plain, .gz or .xz."})
    eval_file: str | None = option(None, "Text to evaluate on. Default: 5 % of the samples of train_file, left out.")
    max_length: int = option(128, "Tokens of a sample.")
    max_train_samples: int | None = option(
        None, "Take so many samples, evenly spaced over the text; those to evaluate on, if left out, are among them."
    )
    max_eval_samples: int | None = option(500, "Evaluate on so many.")
    mlm_probability: float = option(0.15, "Part of the tokens to predict; of these 80 % masked, 10 % replaced.")
    untie_head: bool = option(
        False, f"Give the output layer weights of its own; {SOFTMAX_BOUND} and head_learning_rate need them."
    )

    def __post_init__(self) -> None:
        """Checks the numbers; raises ValueError."""
        check_positive(self, "max_length", "max_train_samples", "max_eval_samples")
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability must be between 0 and 1, got {self.mlm_probability}")


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    model: ModelArguments
    text: TextArguments
    train: BatchedRunArguments
    head: HeadArguments


class VisitSampler(EpochSampler):
    """Numbers `epoch * length + index`, so that a sample can differ between its visits."""

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            yield self.epoch * self.length + index


class MaskedTexts(Dataset[dict[str, Tensor]]):
    """Samples with some tokens masked, at least one; item `epoch * length + index` is one as masked in that epoch.

    Args:
        ids: tokens `[n, length]`.
        tokenizer: with a token for masking.
        probability: part of the tokens to predict; special ones are never chosen.
        seed: of the masks.

    Raises:
        ValueError: if the tokenizer has no token for masking.
    """

    def __init__(self, ids: Tensor, tokenizer: Any, probability: float, seed: int) -> None:
        self.ids, self.seed = ids, seed
        self.masker = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, visit: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(mix(self.seed, visit))
        sample, self.masker.generator = self.ids[visit % len(self.ids)], generator
        ids, labels = (rows[0] for rows in self.masker.torch_mask_tokens(sample.unsqueeze(0).clone()))
        if bool((labels == -100).all()):  # a short sample; without a label the loss of a batch would be 0 / 0
            special = self.masker.tokenizer.get_special_tokens_mask(sample.tolist(), already_has_special_tokens=True)
            places = (torch.tensor(special) == 0).nonzero()[:, 0]
            place = places[torch.randint(len(places), (), generator=generator)]
            ids[place], labels[place] = self.masker.tokenizer.mask_token_id, sample[place]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def load_model(arguments: Arguments, seed: int) -> PreTrainedModel:
    """The pretrained model, its attention switched and, if asked for, its output layer untied.

    Raises:
        ValueError: if options are for the output layer alone, and it shares its weights with the embeddings.
    """
    auto, performer = AutoModelForMaskedLM, PerformerBertForMaskedLM
    model = load_switched(arguments.model, auto, performer, seed, lambda config: None)
    if arguments.text.untie_head:
        return untie(model)
    of_head = arguments.head.head_optimizer == SOFTMAX_BOUND or arguments.head.head_learning_rate is not None
    if of_head and model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise ValueError(
            f"head_optimizer {SOFTMAX_BOUND} and head_learning_rate are for the output layer alone, so it must not "
            "share its weights with the embeddings: add --untie_head"
        )
    return model


def untie(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the output layer weights of its own, equal to the shared ones; saved and loaded as such.

    Raises:
        ValueError: if the output layer is not an `nn.Linear`.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output layer to untie")
    for name, shared in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(shared.detach().clone()))
    model.config.tie_word_embeddings = False
    return model


def make_loaders(
    arguments: Arguments, tokenizer: Any, seed: int
) -> tuple[DataLoader[dict[str, Tensor]], DataLoader[dict[str, Tensor]]]:
    """Loaders of the training samples, shuffled, and of those to evaluate on, which are masked once and for all.

    Raises:
        ValueError: if a text is too short.
    """
    text, train = arguments.text, arguments.train
    # In one order, so that the same samples are left out whatever the seed.
    ids = samples(text.train_file, tokenizer, text.max_length, text.max_train_samples)
    if text.eval_file is None:
        held = math.ceil(0.05 * len(ids))
        if held == len(ids):
            raise ValueError(f"{text.train_file} is one sample of {text.max_length} tokens: give a longer text")
        ids, held_out = ids[held:], ids[:held][: text.max_eval_samples]
    else:
        held_out = samples(text.eval_file, tokenizer, text.max_length, text.max_eval_samples)
    data = MaskedTexts(ids, tokenizer, text.mlm_probability, seed)
    fixed = MaskedTexts(held_out, tokenizer, text.mlm_probability, 0)
    sampler = VisitSampler(len(data), seed)
    return (
        DataLoader(data, train.per_device_train_batch_size, sampler=sampler),
        DataLoader(fixed, train.per_device_eval_batch_size),
    )


@torch.no_grad()
def evaluate(run: loop.Run, loader: Any) -> dict[str, float]:
    """Mean cross-entropy of the masked tokens in nats, its exponential, and how many the model gets right.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    run.model.eval()
    parts = []
    for batch in loader:
        logits, labels = run.model(**batch).logits.float(), batch["labels"]
        chosen = labels != -100
        losses = torch.zeros_like(labels, dtype=torch.float32)
        losses[chosen] = nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="none")
        right = (logits.argmax(-1) == labels) & chosen
        sums = torch.stack([losses.sum(-1), right.sum(-1).float(), chosen.sum(-1).float()], dim=-1)
        parts.append(run.accelerator.gather_for_metrics(sums).double().cpu())
    loss, right, number = torch.cat(parts).sum(0).tolist()
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is not finite at step {run.progress.step}: lower the learning rate")
    return {"loss": loss / number, "perplexity": math.exp(min(loss / number, 700.0)), "accuracy": right / number}


def train_model(arguments: Arguments, seed: int, folder: Path) -> tuple[loop.Run, PreTrainedModel]:
    """One whole training; returns the run and the trained model, which `folder` holds too."""
    # The bias of an untied head, a pooler or another head may have no part in the loss.
    parallel = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = loop.make_accelerator(arguments.train, folder, [parallel])
    if note := arguments.model.without_effect():
        accelerator.print(note)
    tokenizer, model = load_tokenizer(arguments.model), load_model(arguments, seed)
    check_positions(model, arguments.text.max_length)
    train_loader, eval_loader = make_loaders(arguments, tokenizer, seed)
    optimizer, clipped = make_optimizer(model, arguments.train, arguments.head, model.config.vocab_size)
    prepared = accelerator.prepare(model, optimizer, train_loader)
    eval_loader = accelerator.prepare(eval_loader)
    run = loop.start(accelerator, prepared, arguments.train, seed, folder, clipped)
    progress = run.progress
    if not progress.history and not progress.step:
        accelerator.print(f"before training: {report.describe(evaluate(run, eval_loader))}")
    for epoch in loop.epochs(run, arguments.train):
        metrics = evaluate(run, eval_loader)
        progress.history.append({"epoch": epoch, "step": progress.step, "metrics": metrics})
        accelerator.log({f"eval_{name}": value for name, value in metrics.items()}, step=progress.step)
        accelerator.print(f"\nepoch {epoch}, step {progress.step}: {report.describe(metrics)}")
    trained = accelerator.unwrap_model(run.model)
    if accelerator.is_main_process:
        trained.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    accelerator.end_training()
    return run, trained


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and returns what `all_results.json` holds.

    Args:
        argv: the command line without the program's name. Default None: `sys.argv`.

    Raises:
        ValueError: for arguments or files that cannot be used; the message says which and why.
    """
    arguments = Arguments.parse(argv, __doc__)
    train, folder = arguments.train, Path(arguments.train.output_dir)
    accelerator = Accelerator(mixed_precision=train.mixed_precision)
    seed = DEFAULT_SEED if train.seed is None else train.seed
    settings = arguments.settings(accelerator.num_processes) | {"seed": seed}
    checkpoint.open_run(folder, settings, train.resume, train.overwrite_output_dir)
    if train.resume and (folder / checkpoint.RESULTS).exists():
        return json.loads((folder / checkpoint.RESULTS).read_text())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoint.start_run(folder, settings, train.overwrite_output_dir)
    accelerator.wait_for_everyone()
    run, model = train_model(arguments, seed, folder)
    backend = model.config._attn_implementation
    results = {
        "metrics": run.progress.history[-1]["metrics"],
        "train_loss": run.progress.loss_sum / run.progress.step,
        "steps": run.progress.step,
        "history": run.progress.history,
        "seconds_per_step": statistics.median(run.seconds) if run.seconds else None,
        "peak_memory_bytes": report.peak_memory(accelerator.device),
        "attn_implementation": backend,
        "favor": model.config.favor if backend in favor.BACKENDS else None,
        "num_processes": accelerator.num_processes,
        "arguments": arguments.to_dict() | {"seed": seed},
        "command": shlex.join(["python", "-m", "favor.train.mlm", *(sys.argv[1:] if argv is None else argv)]),
        "versions": report.versions(),
    }
    if accelerator.is_main_process:
        checkpoint.write_json(folder / checkpoint.RESULTS, results)
    return results


def cli() -> None:
    """The console script: its exit status must not be what `main` returns."""
    main()


if __name__ == "__main__":
    cli()
