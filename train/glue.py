r"""Fine-tune a pretrained model on a GLUE task, with exact or FAVOR attention.

    accelerate launch -m favor.train.glue --model_name_or_path bert-base-uncased --task_name mrpc \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/mrpc

Without `--data_dir` the task comes from the hub (`nyu-mll/glue`). The output folder gets the model of the last
step, its tokenizer, `all_results.json` and a model card. With several numbers of `--seed` each has a folder of
its own, and the output folder gets mean and standard deviation. `accelerate launch` decides whether the program runs
on a CPU, one GPU or several.

With `--teacher` the model also learns from one that was fine-tuned on the task with exact attention: from its hidden
states and its predictions.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
import transformers
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

import favor
from favor.train.common import checkpoint, loop, report
from favor.train.common.arguments import (
    FREE,
    ArgumentGroups,
    DataArguments,
    HeadArguments,
    ModelArguments,
    TrainArguments,
    option,
)
from favor.train.common.lock import releases_locks
from favor.train.common.optimizers import make_optimizer
from favor.train.common.pretrained import check_model, check_positions, load_tokenizer
from favor.train.common.program import program
from favor.train.text import glue_report
from favor.train.text.glue_data import GlueData, Task, get_task, load_glue
from favor.train.text.glue_labels import rows_set
from favor.train.text.glue_loaders import cut_off, make_loaders
from favor.train.text.glue_models import load_model, load_teacher
from favor.train.text.metrics import load_glue_metric


@dataclass
class TeacherArguments:
    """An exact model to learn from."""

    teacher: str | None = option(None, "Folder or hub name of a model that was fine-tuned with exact attention.")
    logits_weight: float = option(1.0, "Weight of the divergence from the teacher's predictions.")
    hidden_weight: float = option(1.0, "Weight of the relative squared error of the hidden states of all layers.")

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError."""
        weights = {"logits_weight": self.logits_weight, "hidden_weight": self.hidden_weight}
        for name, weight in weights.items():
            if weight < 0:
                raise ValueError(f"{name} must not be negative, got {weight}")
        if not any(weights.values()):
            raise ValueError("logits_weight and hidden_weight are both 0, so nothing is learned from a teacher")
        changed = [name for name, weight in weights.items() if weight != 1]
        if self.teacher is None and changed:
            raise ValueError(f"{', '.join(changed)} needs a teacher: add --teacher DIR")


@dataclass
class Arguments(ArgumentGroups):
    """All arguments of a fine-tuning; `settings` leaves out the seeds."""

    free: ClassVar[tuple[str, ...]] = (*FREE, "seed")

    model: ModelArguments
    data: DataArguments
    train: TrainArguments
    head: HeadArguments
    teacher: TeacherArguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-glue")


def prepare_run(
    arguments: Arguments, data: GlueData, tokenizer: Any, seed: int, folder: Path
) -> tuple[loop.Run, dict[str, Any]]:
    """Prepares the training of one seed, or resumes it at its last checkpoint, and the loaders for evaluation.

    Args:
        arguments: all arguments of the program.
        data: samples of the task.
        tokenizer: that of the checkpoint.
        seed: of this training.
        folder: of its checkpoints.
    """
    train = arguments.train
    own = arguments.teacher
    accelerator = loop.make_accelerator(train, folder)
    model = load_model(arguments.model, data.task, seed, accelerator.print)
    check_positions(model, arguments.data.max_length)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    # Tensor cores want multiples of 8.
    multiple = 8 if accelerator.mixed_precision != "no" else None
    rows = rows_set(model.config, data.task)
    train_loader, eval_loaders = make_loaders(data, tokenizer, arguments.data, train, seed, multiple, rows)
    if arguments.data.distractors and (note := cut_off(train_loader.dataset, arguments.data.max_length)):
        accelerator.print(note)
    teacher = None
    if own.teacher:
        teacher = load_teacher(own, arguments.model, model, data.task, accelerator.print)
    optimizer, clipped = make_optimizer(model, train, arguments.head, len(data.task.labels or ("score",)))
    prepared = accelerator.prepare(model, optimizer, train_loader)
    eval_loaders = {split: accelerator.prepare(loader) for split, loader in eval_loaders.items()}
    run = loop.start(accelerator, prepared, train, seed, folder, clipped)
    if teacher is not None:
        teacher.model.to(accelerator.device)

        def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
            with accelerator.autocast():
                return teacher.loss(model, batch)

        run.loss = loss
    return run, eval_loaders


@torch.no_grad()
def evaluate(run: loop.Run, eval_loaders: dict[str, Any], task: Task) -> dict[str, Any]:
    """Computes the scores on the development sets, and whether the predictions are constant.

    Raises:
        FloatingPointError: if a logit is not finite.
    """
    metric = load_glue_metric(task.name)
    run.model.eval()
    rows = rows_set(run.accelerator.unwrap_model(run.model).config, task)
    scores: dict[str, float] = {}
    constant = False
    for split, loader in eval_loaders.items():
        predictions, references = [], []
        for batch in loader:
            labels = batch.pop("labels")  # numbers of the data, which are not those of the model
            logits = run.model(**batch).logits.float()[:, rows]
            if not logits.isfinite().all():
                raise FloatingPointError(f"a logit is not finite at step {run.progress.step}: lower the learning rate")
            guess = logits.squeeze(-1) if task.is_regression else logits.argmax(-1)
            guess, labels = run.accelerator.gather_for_metrics((guess, labels))
            predictions.append(guess.cpu())
            references.append(labels.cpu())
        said, true = torch.cat(predictions).numpy(), torch.cat(references).numpy()
        scores.update(glue_report.named(metric.compute(predictions=said, references=true), split))
        constant = constant or glue_report.is_constant(said)
    return {"epoch": len(run.progress.history) + 1, "step": run.progress.step, "metrics": scores, "constant": constant}


def train_seed(arguments: Arguments, data: GlueData, seed: int, folder: Path) -> dict[str, Any]:
    """Trains with one seed and saves the model and its tokenizer in `folder`; returns the entry of the results.

    Args:
        arguments: all arguments of the program.
        data: samples of the task.
        seed: of this training.
        folder: of the saved model and the checkpoints.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    tokenizer = load_tokenizer(arguments.model)
    run, eval_loaders = prepare_run(arguments, data, tokenizer, seed, folder)
    accelerator, progress = run.accelerator, run.progress
    with loop.stoppable(run):
        for _ in loop.epochs(run, arguments.train):
            entry = evaluate(run, eval_loaders, data.task)
            progress.history.append(entry)
            accelerator.log(entry["metrics"], step=progress.step)
            accelerator.print(
                f"\nseed {seed}, epoch {entry['epoch']}, step {progress.step}: {report.describe(entry['metrics'])}"
            )
    last = progress.history[-1]
    if last["constant"]:
        accelerator.print(f"WARNING: seed {seed} predicts the same for every sample; try another learning rate")
    model = accelerator.unwrap_model(run.model)
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, model, tokenizer)
        accelerator.print(report.load_line(model, folder, AutoModelForSequenceClassification))
    for tracker in accelerator.trackers:
        tracker.finish()
    backend = model.config._attn_implementation
    result = {
        "seed": seed,
        "metrics": last["metrics"],
        "constant_predictions": last["constant"],
        "train_loss": progress.loss_sum / progress.step,
        "steps": progress.step,
        "seconds_per_step": statistics.median(run.seconds) if run.seconds else None,
        "peak_memory_bytes": report.peak_memory(accelerator.device),
        "history": progress.history,
        "model_type": model.config.model_type,
        "attn_implementation": backend,
        "favor": model.config.favor if backend in favor.BACKENDS else None,
        "mixed_precision": accelerator.mixed_precision,
    }
    accelerator.free_memory()
    return result


def announce(accelerator: Accelerator, arguments: Arguments, data: GlueData) -> None:
    """Prints, before the training, which options have no effect, and the baseline."""
    if note := arguments.model.without_effect():
        accelerator.print(note)
    scores = report.describe(glue_report.baseline(data, load_glue_metric(data.task.name)))
    accelerator.print(f"{data.task.folder}: {len(data.train)} samples to train; majority baseline {scores}")


@releases_locks
def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains every seed and returns what `all_results.json` holds.

    Args:
        argv: the command line without the program's name. Default None: `sys.argv`.

    Raises:
        ValueError: for arguments, files or rows that cannot be used; the message says which and why.
    """
    arguments = parse_arguments(argv)
    train, task = arguments.train, get_task(arguments.data.task_name)
    accelerator = Accelerator(mixed_precision=train.mixed_precision)
    if not accelerator.is_local_main_process:
        transformers.utils.logging.set_verbosity_error()
        datasets.disable_progress_bars()
    output = Path(train.output_dir)
    seeds: list[int] = train.seed
    folders = {seed: output / f"seed_{seed}" if len(seeds) > 1 else output for seed in seeds}
    settings = arguments.settings(accelerator.num_processes)
    for folder in {output, *folders.values()}:
        checkpoint.open_run(folder, settings, train.resume, train.overwrite_output_dir)
    check_model(arguments.model.model_name_or_path)
    with accelerator.main_process_first():
        data = load_glue(task.name, arguments.data.data_dir)
    data.keep_first(arguments.data.max_train_samples, arguments.data.max_eval_samples)
    data.add_distractors(arguments.data.distractors)
    announce(accelerator, arguments, data)
    command = shlex.join(["python", "-m", "favor.train.glue", *(sys.argv[1:] if argv is None else argv)])
    per_seed = []
    for seed, folder in folders.items():
        finished = folder / checkpoint.RESULTS
        if train.resume and finished.exists():
            per_seed += checkpoint.read_json(finished)["per_seed"]
            continue
        if accelerator.is_main_process:
            checkpoint.start_run(folder, settings, train.overwrite_output_dir)
        accelerator.wait_for_everyone()
        per_seed.append(train_seed(arguments, data, seed, folder))
        own = glue_report.all_results(arguments, data, per_seed[-1:], command, accelerator.state)
        write_results(accelerator, folder, own, task)
    results = glue_report.all_results(arguments, data, per_seed, command, accelerator.state)
    if len(seeds) > 1:
        write_results(accelerator, output, results, task)
    accelerator.print(
        f"{task.folder}: {report.describe(results['metrics'], results['metrics_std'])}; "
        f"baseline {report.describe(results['baseline'])}; {output / checkpoint.RESULTS}"
    )
    accelerator.end_training()
    return results


def write_results(accelerator: Accelerator, folder: Path, results: dict[str, Any], task: Task) -> None:
    """Writes the model card, then `all_results.json`, which marks the run as finished."""
    if accelerator.is_main_process:
        card = folder / "README.md"
        if card.exists() and glue_report.MARK not in card.read_text(encoding="utf-8", errors="replace"):
            accelerator.print(f"{card} is not of this program and stays: the model card is {glue_report.OTHER_CARD}")
            card = folder / glue_report.OTHER_CARD
        card.write_text(glue_report.model_card(task, results, folder.resolve().name), encoding="utf-8")
        checkpoint.write_json(folder / checkpoint.RESULTS, results)


cli = program("favor-glue", main)

if __name__ == "__main__":
    cli()
