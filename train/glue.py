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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from favor.train.common import checkpoint, loop
from favor.train.common.arguments import (
    FREE,
    ArgumentGroups,
    Checked,
    DataArguments,
    HeadArguments,
    ModelArguments,
    TrainArguments,
    option,
    refuse,
)
from favor.train.common.lock import releases_locks
from favor.train.common.pieces import Pieces, pieces_of
from favor.train.common.pretrained import check_positions, load_tokenizer, make_optimizer
from favor.train.common.program import describe, load_line, of_program, of_training, program
from favor.train.text import glue_report
from favor.train.text.glue_data import GlueData, Task, get_task, load_glue
from favor.train.text.glue_models import cut_off, load_model, load_teacher, make_loaders, rows_set
from favor_command.saved import check_model


@dataclass
class TeacherArguments(Checked):
    """An exact model to learn from."""

    teacher: str | None = option(None, "Folder or hub name of a model that was fine-tuned with exact attention.")
    logits_weight: float = option(1.0, "Weight of the divergence from the teacher's predictions.", least=0)
    hidden_weight: float = option(
        1.0, "Weight of the relative squared error of the hidden states of all layers.", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = [name for name in ("logits_weight", "hidden_weight") if getattr(self, name) != 1]
        refuse(
            (
                not (self.logits_weight or self.hidden_weight),
                "logits_weight and hidden_weight are both 0, so nothing is learned from a teacher",
            ),
            (self.teacher is None and changed, f"{', '.join(changed)} needs a teacher: add --teacher DIR"),
        )


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


def _prepare_run(
    arguments: Arguments, data: GlueData, tokenizer: Any, seed: int, folder: Path
) -> tuple[loop.Run, dict[str, Any]]:
    """Prepares the training of one seed, or resumes it at its last checkpoint, and the loaders for evaluation."""
    train, own, task = arguments.train, arguments.teacher, data.task
    accelerator = loop.make_accelerator(train)
    model = load_model(arguments.model, task, seed, accelerator.print)
    check_positions(model, arguments.data.max_length)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    multiple = 8 if accelerator.mixed_precision != "no" else None  # tensor cores want multiples of 8
    pieces = pieces_of(accelerator, model, arguments.to_dict())
    if pieces.size > 1:
        multiple = pieces.multiple
    rows = rows_set(model.config, task)
    train_loader, eval_loaders = make_loaders(data, tokenizer, arguments.data, train, seed, multiple, rows)
    if arguments.data.distractors and (note := cut_off(train_loader.dataset, arguments.data.max_length)):
        accelerator.print(note)
    teacher = load_teacher(own, arguments.model, model, task, accelerator.print) if own.teacher else None
    pieces.check(model, train_loader)
    optimizer, clipped = make_optimizer(model, train, arguments.head, task.num_labels)
    prepared = (*accelerator.prepare(model, optimizer), pieces.prepare(train_loader))
    eval_loaders = {split: pieces.prepare(loader) for split, loader in eval_loaders.items()}
    run = loop.start(accelerator, prepared, train, seed, folder, clipped, pieces=pieces)
    if pieces.size > 1:
        run.loss = _loss_of_pieces(pieces)
    if teacher is not None:
        teacher.model.to(accelerator.device)
        run.loss = accelerator.autocast()(teacher.loss)
    return run, eval_loaders


def _loss_of_pieces(pieces: Pieces) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """Makes a loss whose mean over a group is that of its first process, which has the token of the classifier."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        own: Tensor = model(**pieces.cut(batch), labels=labels).loss
        return own * (0 if dist.get_rank(pieces.group) else pieces.size)

    return loss


@torch.no_grad()
def _evaluate(run: loop.Run, eval_loaders: dict[str, Any], task: Task) -> dict[str, Any]:
    """Computes the scores on the development sets, and whether the predictions are constant."""
    run.model.eval()
    rows = rows_set(run.trained.config, task)
    scores: dict[str, float] = {}
    constant = False
    for split, loader in eval_loaders.items():
        predictions, references = [], []
        for batch in loader:
            labels = batch.pop("labels")  # numbers of the data, which are not those of the model
            with run.pieces.attention():
                logits = run.model(**run.pieces.cut(batch)).logits.float()[:, rows]
            if not logits.isfinite().all():
                raise FloatingPointError(f"a logit is not finite at step {run.progress.step}: lower the learning rate")
            guess = logits.squeeze(-1) if task.is_regression else logits.argmax(-1)
            predictions.append(run.pieces.gather(guess)[0].cpu())
            references.append(run.pieces.gather(labels)[0].cpu())
        said, true = torch.cat(predictions).numpy(), torch.cat(references).numpy()
        scores.update(glue_report.named(glue_report.glue_metrics(task, said, true), split))
        constant = constant or glue_report.is_constant(said)
    return {"epoch": len(run.progress.history) + 1, "step": run.progress.step, "metrics": scores, "constant": constant}


def _train_seed(arguments: Arguments, data: GlueData, seed: int, folder: Path) -> dict[str, Any]:
    """Trains with one seed and saves the model and its tokenizer in `folder`; returns the entry of the results."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    tokenizer = load_tokenizer(arguments.model)
    run, eval_loaders = _prepare_run(arguments, data, tokenizer, seed, folder)
    accelerator, progress = run.accelerator, run.progress
    with loop.stoppable(run):
        for epoch in loop.epochs(run):
            progress.history.append(_evaluate(run, eval_loaders, data.task))
            scores = describe(progress.history[-1]["metrics"])
            accelerator.print(f"\nseed {seed}, epoch {epoch}, step {progress.step}: {scores}")
    last = progress.history[-1]
    if last["constant"]:
        accelerator.print(f"WARNING: seed {seed} predicts the same for every sample; try another learning rate")
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, run.trained, tokenizer)
        accelerator.print(load_line(run.trained, folder, AutoModelForSequenceClassification))
    own = {"seed": seed, "metrics": last["metrics"], "constant_predictions": last["constant"]}
    result = of_training(run, run.trained) | own | {"model_type": run.trained.config.model_type}
    accelerator.free_memory()
    return result


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
    if note := arguments.model.without_effect():
        accelerator.print(note)
    scores = describe(glue_report.baseline(data))
    accelerator.print(f"{task.folder}: {len(data.train)} samples to train; majority baseline {scores}")
    made = of_program("favor.train.glue", argv, arguments.to_dict()) | {"device": str(accelerator.device.type)}
    per_seed = []
    for seed, folder in folders.items():
        finished = folder / checkpoint.RESULTS
        if train.resume and finished.exists():
            per_seed += checkpoint.read_json(finished)["per_seed"]
            continue
        checkpoint.start_run(folder, settings, train.overwrite_output_dir)
        per_seed.append(_train_seed(arguments, data, seed, folder))
        _write_results(accelerator, folder, glue_report.all_results(data, per_seed[-1:], made), task)
    results = glue_report.all_results(data, per_seed, made)
    if len(seeds) > 1:
        _write_results(accelerator, output, results, task)
    accelerator.print(
        f"{task.folder}: {describe(results['metrics'], results['metrics_std'])}; "
        f"baseline {describe(results['baseline'])}; {output / checkpoint.RESULTS}"
    )
    accelerator.end_training()
    return results


def _write_results(accelerator: Accelerator, folder: Path, results: dict[str, Any], task: Task) -> None:
    """Writes the model card, then `all_results.json`, which marks the run as finished."""
    if accelerator.is_main_process:
        card = folder / "README.md"
        if card.exists() and glue_report.MARK not in card.read_text(encoding="utf-8", errors="replace"):
            accelerator.print(f"{card} is not of this program and stays: the model card is {glue_report.OTHER_CARD}")
            card = folder / glue_report.OTHER_CARD
        card.write_text(glue_report.model_card(task, results, folder.resolve().name), encoding="utf-8")
        checkpoint.write_json(folder / checkpoint.RESULTS, results)


cli = program("favor-glue", main, several=True)

if __name__ == "__main__":
    cli()
