"""The training loop of all programs: optimizer steps, checkpoints, and resuming in the middle of an epoch."""

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
from tqdm.auto import tqdm
from transformers import get_scheduler

import favor
from favor._parts import needs
from favor.train.common import checkpoint
from favor.train.common.arguments import RunArguments
from favor.train.common.batches import mix


@dataclass
class Run:
    """One training: the objects that `accelerator.prepare` returned, and the progress.

    Attributes:
        clipped: the parameters whose gradients are clipped.
        states: all that a checkpoint holds.
        after_step: called after every optimizer step.
        loss: (model, batch) -> loss; None is the loss that the model gives for the batch.
        seconds: duration of every optimizer step.
    """

    accelerator: Accelerator
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
    after_step: Callable[[], None] | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    seconds: list[float] = field(default_factory=list)


def make_accelerator(arguments: RunArguments, folder: Path, kwargs_handlers: list[Any] | None = None) -> Accelerator:
    """Makes the accelerator of one training, set up by `accelerate launch` and the arguments."""
    if arguments.report_to == "tensorboard":
        needs("train", "tensorboard")
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=arguments.gradient_accumulation_steps),
        mixed_precision=arguments.mixed_precision,
        log_with="tensorboard" if arguments.report_to == "tensorboard" else None,
        project_dir=folder,
        kwargs_handlers=kwargs_handlers,
    )


def start(
    accelerator: Accelerator,
    prepared: tuple[Any, Any, Any],
    arguments: RunArguments,
    seed: int,
    folder: Path,
    clipped: list[torch.nn.Parameter],
    **others: Any,
) -> Run:
    """Makes a run at its beginning, or at its last checkpoint if it is resumed.

    Args:
        accelerator: the one that prepared everything.
        prepared: model, optimizer and training loader.
        arguments: steps, schedule, resuming.
        seed: of the run.
        folder: of its checkpoints.
        clipped: the parameters whose gradients are clipped.
        **others: further parts of a checkpoint, with `state_dict` and `load_state_dict`.

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
    progress = checkpoint.Progress()
    parts = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"progress": progress, "redraws": favor.RedrawCounter(model), **others}
    states = checkpoint.States(accelerator, parts)
    if arguments.resume or arguments.checkpointing_steps:
        states.check()
    if arguments.resume and (saved := checkpoint.resume(states, folder)):
        accelerator.print(f"continuing from {saved.name}, step {progress.step} of {total_steps}")
    if arguments.report_to != "none":
        accelerator.init_trackers("tensorboard")
    return Run(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        progress,
        seed,
        folder,
        steps_per_epoch,
        total_steps,
        clipped,
        states,
    )


@contextmanager
def stoppable(run: Run) -> Iterator[None]:
    """Gives a KeyboardInterrupt a message that says where the run was stopped and how to continue it."""
    try:
        yield
    except KeyboardInterrupt as error:
        saved = checkpoint.checkpoints(run.folder)
        after = f"continue with --resume, from {saved[-1].name}" if saved else "it has no checkpoint to continue from"
        raise KeyboardInterrupt(f"stopped at step {run.progress.step}; {after}") from error


def epochs(run: Run, arguments: RunArguments) -> Iterator[int]:
    """Trains the remaining epochs; yields the number of each epoch, from 1, when the epoch is over.

    The caller appends an entry to `run.progress.history` before it asks for the next epoch.
    """
    quiet = not run.accelerator.is_local_main_process
    with tqdm(total=run.total_steps, initial=run.progress.step, desc=f"seed {run.seed}", disable=quiet) as bar:
        while len(run.progress.history) < math.ceil(run.total_steps / run.steps_per_epoch):
            train_epoch(run, arguments, bar)
            yield len(run.progress.history) + 1


def training_mode(model: torch.nn.Module) -> None:
    """Puts a model into training mode, but for the parts that are not trained.

    Statistics of batch normalisation change in training mode without any gradient.
    """
    model.train()
    for module in model.modules():
        weights = [*module.parameters()]
        if weights and not any(weight.requires_grad for weight in weights):
            module.eval()


def train_epoch(run: Run, arguments: RunArguments, bar: tqdm) -> None:
    """Trains from the present step to the end of the epoch, or of all steps.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    accelerator, progress, epoch = run.accelerator, run.progress, len(run.progress.history)
    done = (progress.step - epoch * run.steps_per_epoch) * arguments.gradient_accumulation_steps
    batches = accelerator.skip_first_batches(run.train_loader, done) if done else run.train_loader
    # Set it on both: each loader, when it is iterated, passes its own epoch on to the sampler.
    for loader in (run.train_loader, batches):
        loader.set_epoch(epoch)
    training_mode(run.model)
    losses: list[torch.Tensor] = []
    clock = time.perf_counter()
    for index, batch in enumerate(batches, done):
        if progress.step == run.total_steps:
            break
        # Dropout depends on the place in the run alone, so that a resumed run repeats its masks.
        torch.manual_seed(mix(run.seed, epoch, index, accelerator.process_index))
        with accelerator.accumulate(run.model):
            loss = run.model(**batch).loss if run.loss is None else run.loss(run.model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients and arguments.max_grad_norm > 0:
                accelerator.clip_grad_norm_(run.clipped, arguments.max_grad_norm)
            run.optimizer.step()
            run.optimizer.zero_grad()
        losses.append(loss.detach())
        if not accelerator.sync_gradients:
            continue
        rate = run.scheduler.get_last_lr()[0]
        if not accelerator.optimizer_step_was_skipped:
            run.scheduler.step()
        mean_loss = torch.stack(losses).mean().item()
        losses.clear()
        if not math.isfinite(mean_loss):
            raise FloatingPointError(f"the loss is {mean_loss} at step {progress.step + 1}: lower the learning rate")
        progress.step += 1
        if run.after_step is not None:
            run.after_step()
        progress.loss_sum += mean_loss
        run.seconds.append(time.perf_counter() - clock)
        bar.update()
        accelerator.log({"train_loss": mean_loss, "learning_rate": rate}, step=progress.step)
        if arguments.checkpointing_steps and progress.step % arguments.checkpointing_steps == 0:
            checkpoint.save_checkpoint(run.states, run.folder, progress.step)
        clock = time.perf_counter()
