"""The training loop of all programs: order of samples, optimizer steps, checkpoints, and resuming within an epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Sampler
from tqdm.auto import tqdm
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_length_grouped_indices

import favor
from favor.train.common import checkpoint
from favor.train.common.arguments import RunArguments
from favor.train.common.pieces import Pieces

MAX_GRAD_NORM = 1.0


class EpochSampler(Sampler[int]):
    """A random order that depends on the seed and the epoch alone, so that a resumed run repeats it.

    With `tokens`, the length of each sample, samples of about the same length share a batch of `batch_size`;
    transformers' `LengthGroupedSampler` does so too, but here the batches come in random order.
    """

    def __init__(self, length: int, seed: int, tokens: list[int] | None = None, batch_size: int = 1) -> None:
        self.length, self.seed, self.epoch = length, seed, 0
        self.tokens, self.batch_size = tokens, batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator).tolist()
        if self.tokens is None:
            yield from order
            return
        # Lengths are alike inside a batch, and batches are in random order. A last, smaller batch has any lengths.
        full = self.length // self.batch_size
        kept, rest = order[: full * self.batch_size], order[full * self.batch_size :]
        if kept:
            tokens = [self.tokens[sample] for sample in kept]
            grouped = get_length_grouped_indices(tokens, self.batch_size, generator=generator)
            for batch in torch.randperm(full, generator=generator).tolist():
                yield from (kept[i] for i in grouped[batch * self.batch_size : (batch + 1) * self.batch_size])
        yield from rest


class VisitSampler(EpochSampler):
    """A sampler that yields `epoch * length + index`, so that a sample can differ between epochs."""

    def __iter__(self) -> Iterator[int]:
        yield from (self.epoch * self.length + index for index in super().__iter__())


def mix(*numbers: int) -> int:
    """Makes one seed from several non-negative numbers; two lists of numbers almost never give the same seed."""
    result = 0
    for number in numbers:
        result = (result * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return result


def weight_average(model: torch.nn.Module, decay: float) -> AveragedModel:
    """Makes an average of a model's weights, to be updated after every optimizer step.

    The decay grows with the steps, min(decay, (1 + n) / (10 + n)), so that the first weights are soon forgotten.
    Buffers are copied from the model.
    """

    def average(averaged: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
        rate = min(decay, (1 + int(count)) / (10 + int(count)))
        return torch.lerp(averaged, new, 1 - rate)

    return AveragedModel(model, avg_fn=average)


@dataclass
class Run:
    """One training: the objects that `accelerator.prepare` returned, and the progress.

    Attributes:
        clipped: the parameters whose gradients are clipped.
        pieces: the groups of processes that cut sequences.
        loss: (model, batch) -> loss, whose mean over a group is that of the batch. None is the loss that the model
            gives for the batch.
        average: of the weights, if there is one.
        seconds: duration of every optimizer step.
    """

    accelerator: Accelerator
    arguments: RunArguments
    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    train_loader: Any
    progress: checkpoint.Progress
    seed: int
    folder: Path
    steps_per_epoch: int
    total_steps: int
    clipped: list[torch.nn.Parameter]
    states: checkpoint.States
    pieces: Pieces
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    average: AveragedModel | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def trained(self) -> Any:
        """The model to evaluate and to save: its average if there is one."""
        return self.accelerator.unwrap_model(self.model) if self.average is None else self.average.module


def make_accelerator(arguments: RunArguments, kwargs_handlers: list[Any] | None = None) -> Accelerator:
    """Makes the accelerator of one training, set up by `accelerate launch` and the arguments."""
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=arguments.gradient_accumulation_steps),
        mixed_precision=arguments.mixed_precision,
        kwargs_handlers=kwargs_handlers,
    )


def start(
    accelerator: Accelerator,
    prepared: tuple[Any, Any, Any],
    arguments: RunArguments,
    seed: int,
    folder: Path,
    clipped: list[torch.nn.Parameter],
    ema_decay: float = 0.0,
    pieces: Pieces | None = None,
) -> Run:
    """Makes a run at its beginning, or at its last checkpoint if it is resumed.

    Args:
        accelerator: the one that prepared everything.
        prepared: model, optimizer and training loader.
        arguments, seed, folder: of the run.
        clipped: the parameters whose gradients are clipped.
        ema_decay: of an average of the weights, see `weight_average`. Default 0: none.
        pieces: the groups of processes that cut sequences. Default None: every process has whole ones.

    Raises:
        ValueError: if there are checkpoints to resume from and none can be used, or if this model cannot be written to
            a checkpoint.
    """
    model, optimizer, train_loader = prepared
    steps_per_epoch = math.ceil(len(train_loader) / arguments.gradient_accumulation_steps)
    total_steps = arguments.max_train_steps or math.ceil(arguments.num_train_epochs * steps_per_epoch)
    warmup = math.ceil(arguments.warmup_ratio * total_steps)
    # The scheduler has the bare optimizer: a prepared scheduler would advance once for each process.
    scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer.optimizer, warmup, total_steps)
    progress, bare = checkpoint.Progress(), accelerator.unwrap_model(model)
    average = weight_average(bare, ema_decay) if ema_decay else None
    parts = {"model": bare, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}
    parts |= {"redraws": favor.RedrawCounter(model), **({} if average is None else {"average": average})}
    pieces = pieces or Pieces(accelerator)
    states = checkpoint.States(accelerator, parts, pieces.size)
    if arguments.resume or arguments.checkpointing_steps:
        states.check()
    if arguments.resume and (saved := checkpoint.resume(states, folder)):
        accelerator.print(f"continuing from {saved.name}, step {progress.step} of {total_steps}")
    parts_of_run = (accelerator, arguments, model, optimizer, scheduler, train_loader, progress, seed, folder)
    return Run(*parts_of_run, steps_per_epoch, total_steps, clipped, states, pieces, average=average)


@contextmanager
def stoppable(run: Run) -> Iterator[None]:
    """Gives a KeyboardInterrupt a message that says where the run was stopped and how to continue it."""
    try:
        yield
    except KeyboardInterrupt as error:
        saved = checkpoint.checkpoints(run.folder)
        after = f"continue with --resume, from {saved[-1].name}" if saved else "it has no checkpoint to continue from"
        raise KeyboardInterrupt(f"stopped at step {run.progress.step}; {after}") from error


def epochs(run: Run) -> Iterator[int]:
    """Trains the remaining epochs; yields the number of each epoch, from 1, when the epoch is over.

    The caller appends an entry to `run.progress.history` before it asks for the next epoch.
    """
    quiet = not run.accelerator.is_local_main_process
    with tqdm(total=run.total_steps, initial=run.progress.step, desc=f"seed {run.seed}", disable=quiet) as bar:
        while len(run.progress.history) < math.ceil(run.total_steps / run.steps_per_epoch):
            train_epoch(run, bar)
            yield len(run.progress.history) + 1


def _training_mode(model: torch.nn.Module) -> None:
    """Puts a model into training mode, but for the parts that are not trained."""
    model.train()
    for module in model.modules():
        weights = [*module.parameters()]
        if weights and not any(weight.requires_grad for weight in weights):
            module.eval()


def train_epoch(run: Run, bar: tqdm) -> None:
    """Trains from the present step to the end of the epoch; raises FloatingPointError if the loss is not finite."""
    accelerator, progress, epoch = run.accelerator, run.progress, len(run.progress.history)
    done = (progress.step - epoch * run.steps_per_epoch) * run.arguments.gradient_accumulation_steps
    batches = accelerator.skip_first_batches(run.train_loader, done) if done else run.train_loader
    # Set it on both: each loader, when it is iterated, passes its own epoch on to the sampler.
    for loader in (run.train_loader, batches):
        loader.set_epoch(epoch)
    _training_mode(run.model)
    losses: list[torch.Tensor] = []
    clock = time.perf_counter()
    for index, batch in enumerate(batches, done):
        if progress.step == run.total_steps:
            break
        # Dropout depends on the place in the run alone, so that a resumed run repeats its masks.
        torch.manual_seed(mix(run.seed, epoch, index, accelerator.process_index))
        with accelerator.accumulate(run.model), run.pieces.attention():
            loss = run.model(**batch).loss if run.loss is None else run.loss(run.model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.clipped, MAX_GRAD_NORM)
            run.optimizer.step()
            run.optimizer.zero_grad()
        losses.append(loss.detach())
        if not accelerator.sync_gradients:
            continue
        if not accelerator.optimizer_step_was_skipped:
            run.scheduler.step()
        mean_loss = run.pieces.total(torch.stack(losses).mean()).item() / run.pieces.size
        losses.clear()
        if not math.isfinite(mean_loss):
            raise FloatingPointError(f"the loss is {mean_loss} at step {progress.step + 1}: lower the learning rate")
        progress.step += 1
        if run.average is not None:
            run.average.update_parameters(accelerator.unwrap_model(run.model))
        progress.losses.append(mean_loss)
        run.seconds.append(time.perf_counter() - clock)
        bar.update()
        if (every := run.arguments.checkpointing_steps) and progress.step % every == 0:
            checkpoint.save_checkpoint(run.states, run.folder, progress.step)
        clock = time.perf_counter()
