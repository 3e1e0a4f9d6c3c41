"""Parts that the programs for language models share: arguments, samples of one text, and the training on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from favor.train.common import checkpoint, loop
from favor.train.common.arguments import (
    DEFAULT_SEED,
    SOFTMAX_BOUND,
    ArgumentGroups,
    BatchedRunArguments,
    Checked,
    HeadArguments,
    ModelArguments,
    option,
    refuse,
)
from favor.train.common.lock import releases_locks
from favor.train.common.loop import VisitSampler
from favor.train.common.pieces import Pieces, pieces_of
from favor.train.common.pretrained import check_positions, load_switched, load_tokenizer, make_optimizer
from favor.train.common.program import describe, load_line, of_program, of_training, program
from favor.train.text.samples import check_text, samples
from favor.train.text.stream import TRAIN, VALIDATION, Stream, first_samples, open_split
from favor_command.saved import check_model


@dataclass(kw_only=True)
class TextArguments(Checked):
    """The text, and the output layer."""

    train_file: str | None = option(None, "Text to learn from: UTF-8, plain, .gz or .xz.")
    dataset_name: str | None = option(
        None,
        "In place of train_file, a data set of the hub, NAME or NAME:CONFIGURATION, or a folder of Parquet, JSON lines "
        "or text files. Its split train is read as a stream of texts (column text) while the model trains, and begins "
        "again when it ends. It needs max_train_steps, which are one epoch.",
    )
    validation_file: str | None = option(
        None,
        "Text to evaluate on. Default: 5 % of the samples of train_file, which are not trained on, or the first "
        "samples of the split validation of dataset_name.",
    )
    max_length: int = option(128, "Tokens of a sample.", above=0)
    max_train_samples: int | None = option(
        None,
        "Take this number of samples, evenly spaced over the text; without validation_file, 5 % of them to evaluate "
        "on.",
        above=0,
    )
    max_eval_samples: int | None = option(500, "Evaluate on at most this number of samples.", above=0)
    untie_head: bool = option(
        False, f"Give the output layer weights of its own; needed for {SOFTMAX_BOUND} and head_learning_rate."
    )


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a run."""

    model: ModelArguments
    text: TextArguments
    train: BatchedRunArguments
    head: HeadArguments

    def __post_init__(self) -> None:
        text = self.text
        refuse(
            (
                (text.train_file is None) == (text.dataset_name is None),
                "give a text, train_file, or a data set, dataset_name: one of them",
            ),
            (
                text.dataset_name is not None and self.train.max_train_steps is None,
                "dataset_name is a stream, whose length is not known: add --max_train_steps",
            ),
            (
                text.dataset_name is not None and text.max_train_samples is not None,
                "max_train_samples is for train_file: leave it out with dataset_name",
            ),
        )


Samples = Dataset[dict[str, Tensor]]


@dataclass(frozen=True)
class Objective:
    """Describes the task that a model learns.

    Attributes:
        name: of the program, `favor.train.NAME`.
        auto_class: class of transformers for the model with its output layer.
        shift: number of places from a prediction to its label: 1 for the next token, 0 for a masked token.
        samples: (tokens `[n, length]` or a stream, tokenizer, seed) -> samples with labels; item
            `epoch * n + index` is sample `index` in that epoch.
        check: raises ValueError for a model that cannot learn the task.
    """

    name: str
    auto_class: Any
    shift: int
    samples: Callable[[Tensor | Stream, Any, int], Samples]
    check: Callable[[PreTrainedModel], None]


def load_model(arguments: Arguments, objective: Objective, seed: int) -> PreTrainedModel:
    """Loads the pretrained model with the chosen attention, and unties its output layer if `untie_head` is set.

    The seed draws weights that the checkpoint lacks, and the random features. Raises ValueError if the model cannot
    learn the task, or if options are for the output layer alone and it shares its weights with the embeddings.
    """
    model = load_switched(arguments.model, objective.auto_class, seed, lambda config: None)
    objective.check(model)
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
    """Gives the output layer weights of its own, equal to the shared ones; a saved model keeps them apart.

    Raises ValueError if the output layer is not an `nn.Linear`.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output layer to untie")
    for name, shared in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(shared.detach().clone()))
    model.config.tie_word_embeddings = False
    return model


def make_loaders(
    arguments: Arguments, objective: Objective, tokenizer: Any, seed: int
) -> tuple[DataLoader[dict[str, Tensor]], DataLoader[dict[str, Tensor]]]:
    """Makes loaders of the training samples, shuffled, and of the evaluation samples, equal in every epoch.

    The seed draws the order and the masks. Raises ValueError if a text or data set is too short or cannot be read.
    """
    text, train = arguments.text, arguments.train
    ids: Tensor | Stream
    if text.dataset_name is not None:
        shares, batch = PartialState().num_processes // train.sequence_parallel, train.per_device_train_batch_size
        number = train.max_train_steps * train.gradient_accumulation_steps * batch * shares
        ids = Stream(text.dataset_name, tokenizer, text.max_length, number, seed, batch, shares)
    else:
        # The order does not depend on the seed, so that the evaluation samples do not either.
        ids = samples(text.train_file, tokenizer, text.max_length, text.max_train_samples)
    if text.validation_file is not None:
        held_out = samples(text.validation_file, tokenizer, text.max_length, text.max_eval_samples)
    elif text.dataset_name is not None:
        held_out = first_samples(text.dataset_name, tokenizer, text.max_length, text.max_eval_samples)
    else:
        held = math.ceil(0.05 * len(ids))
        if held == len(ids):
            raise ValueError(f"{text.train_file} is one sample of {text.max_length} tokens: give a longer text")
        ids, held_out = ids[held:], ids[:held][: text.max_eval_samples]
    data = objective.samples(ids, tokenizer, seed)
    fixed = objective.samples(held_out, tokenizer, 0)
    # Items of a stream are in random order.
    order = None if isinstance(ids, Stream) else VisitSampler(len(ids), seed)
    return (
        DataLoader(data, train.per_device_train_batch_size, sampler=order),
        DataLoader(fixed, train.per_device_eval_batch_size),
    )


def predictions(pieces: Pieces, model: Any, batch: dict[str, Tensor], shift: int) -> tuple[Tensor, Tensor]:
    """Computes the logits of the tokens of this process, and the labels that they predict, -100 for none."""
    labels = nn.functional.pad(batch["labels"][:, shift:], (0, shift), value=-100)
    piece = pieces.cut({**batch, "labels": labels})
    labels = piece.pop("labels")
    return model(**piece).logits.float(), labels


def loss_of_pieces(pieces: Pieces, shift: int) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """Makes a loss whose mean over a group, as DDP takes it of gradients, is the mean over the labels of the batch."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = predictions(pieces, model, batch, shift)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses * pieces.size / pieces.total((labels != -100).sum())

    return loss


@torch.no_grad()
def evaluate(run: loop.Run, loader: Any, shift: int) -> dict[str, float]:
    """Computes mean cross-entropy in nats over the tokens with a label, its exponential, and the accuracy.

    A prediction is `shift` places before its label. Raises FloatingPointError if the loss is not finite.
    """
    run.model.eval()
    parts = []
    for batch in loader:
        with run.pieces.attention():
            logits, labels = predictions(run.pieces, run.model, batch, shift)
        chosen = labels != -100
        losses = torch.zeros_like(labels, dtype=torch.float32)
        losses[chosen] = nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="none")
        right = (logits.argmax(-1) == labels) & chosen
        sums = torch.stack([losses.sum(-1), right.sum(-1).float(), chosen.sum(-1).float()], dim=-1)
        parts.append(run.pieces.gather(sums).double().sum(0).cpu())
    loss, right, number = torch.cat(parts).sum(0).tolist()
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is not finite at step {run.progress.step}: lower the learning rate")
    return {"loss": loss / number, "perplexity": math.exp(min(loss / number, 700.0)), "accuracy": right / number}


def train_model(
    arguments: Arguments, objective: Objective, seed: int, folder: Path
) -> tuple[loop.Run, PreTrainedModel]:
    """Trains and saves the model in `folder`, with its checkpoints; returns the run and the trained model."""
    # The loss may not depend on the bias of an untied head, a pooler or another head.
    parallel = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = loop.make_accelerator(arguments.train, [parallel])
    if note := arguments.model.without_effect():
        accelerator.print(note)
    tokenizer, model = load_tokenizer(arguments.model), load_model(arguments, objective, seed)
    check_positions(model, arguments.text.max_length)
    train_loader, eval_loader = make_loaders(arguments, objective, tokenizer, seed)
    pieces = pieces_of(accelerator, model, arguments.to_dict())
    pieces.check(model, eval_loader)
    optimizer, clipped = make_optimizer(model, arguments.train, arguments.head, model.config.vocab_size)
    prepared = (*accelerator.prepare(model, optimizer), pieces.prepare(train_loader))
    eval_loader = pieces.prepare(eval_loader)
    run = loop.start(accelerator, prepared, arguments.train, seed, folder, clipped, pieces=pieces)
    if pieces.size > 1:
        run.loss = loss_of_pieces(pieces, objective.shift)
    progress = run.progress
    if not progress.history and not progress.step:
        progress.before = evaluate(run, eval_loader, objective.shift)
        accelerator.print(f"before training: {describe(progress.before)}")
    with loop.stoppable(run):
        for epoch in loop.epochs(run):
            metrics = evaluate(run, eval_loader, objective.shift)
            progress.history.append({"epoch": epoch, "step": progress.step, "metrics": metrics})
            accelerator.print(f"\nepoch {epoch}, step {progress.step}: {describe(metrics)}")
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, run.trained, tokenizer)
        accelerator.print(load_line(run.trained, folder, objective.auto_class))
    accelerator.end_training()
    return run, run.trained


@releases_locks
def run_program(arguments: Arguments, objective: Objective, words: Sequence[str] | None) -> dict[str, Any]:
    """Trains and returns what `all_results.json` holds, which has the command line, `words`."""
    train, folder = arguments.train, Path(arguments.train.output_dir)
    accelerator = Accelerator(mixed_precision=train.mixed_precision)
    seed = DEFAULT_SEED if train.seed is None else train.seed
    settings = arguments.settings(accelerator.num_processes) | {"seed": seed}
    checkpoint.open_run(folder, settings, train.resume, train.overwrite_output_dir)
    check_model(arguments.model.model_name_or_path)
    for path in (arguments.text.train_file, arguments.text.validation_file):
        if path is not None:
            check_text(path)
    if arguments.text.dataset_name is not None:
        for split in (TRAIN,) if arguments.text.validation_file else (TRAIN, VALIDATION):
            open_split(arguments.text.dataset_name, split)
    if train.resume and (folder / checkpoint.RESULTS).exists():
        return checkpoint.read_json(folder / checkpoint.RESULTS)
    checkpoint.start_run(folder, settings, train.overwrite_output_dir)
    run, model = train_model(arguments, objective, seed, folder)
    results = of_training(run, model) | of_program(
        f"favor.train.{objective.name}", words, arguments.to_dict() | {"seed": seed}
    )
    results |= {"metrics": run.progress.history[-1]["metrics"], "metrics_before": run.progress.before}
    if accelerator.is_main_process:
        checkpoint.write_json(folder / checkpoint.RESULTS, results)
    return results


def programs(
    objective: Objective, text: str | None
) -> tuple[Callable[[Sequence[str] | None], Arguments], Callable[..., dict[str, Any]], Callable[[], None]]:
    """Makes the functions `parse_arguments`, `main` and `cli` of the program for a task, with its docstring `text`."""

    def parse_arguments(words: Sequence[str] | None) -> Arguments:
        """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
        return Arguments.parse(words, text, f"favor-{objective.name}")

    def main(argv: list[str] | None = None) -> dict[str, Any]:
        """Trains and returns what `all_results.json` holds.

        Args:
            argv: the command line without the program's name. Default None: `sys.argv`.

        Raises:
            ValueError: for arguments or files that cannot be used; the message says which and why.
        """
        return run_program(parse_arguments(argv), objective, argv)

    return parse_arguments, main, program(f"favor-{objective.name}", main, several=True)
