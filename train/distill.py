"""Gives a pretrained model linear attention that is close to its exact attention."""

from __future__ import annotations

import copy
import heapq
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, set_seed
from torch import Tensor

import favor
from favor import features as families
from favor.config import feature_family
from favor.integrations.adapt.observe import Observation, observe
from favor.integrations.layer import attention_modules, decodes, layer_options, stored_choice
from favor.integrations.modules import evaluating
from favor.integrations.stored import fix_directions, store_parameters, train_directions, update_choices
from favor.train.common import checkpoint, loop, report
from favor.train.common.average import weight_average
from favor.train.common.lock import releases_locks
from favor.train.common.pretrained import check_model, check_positions, load_exact
from favor.train.common.program import program
from favor.train.common.teacher import Teacher, relative_squared_error
from favor.train.options.distill import NAME, DistillArguments, parse_arguments
from favor.train.text.attention_student import AttentionStudent
from favor.train.text.distill_data import Texts
from favor.train.text.samples import check_text
from favor_command.program import in_one_line
from favor_command.saved import load_processor

if TYPE_CHECKING:
    from favor.train.speech.distill_data import Sounds

RESULTS = checkpoint.RESULTS


class Curve:
    """The losses of a stage, one of each step, as a part of its checkpoints."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Gives the losses."""
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over saved losses."""
        self.losses[:] = state["losses"]


def layers_of(
    model: transformers.PreTrainedModel, inputs: dict[str, Tensor]
) -> tuple[dict[int, tuple[int, int]], bool]:
    """Finds key heads and head_dim of every attention layer, and whether any layer is causal or decodes.

    Args:
        model: with any attention.
        inputs: arguments of the model.
    """
    seen: list[Observation] = []
    with torch.no_grad(), evaluating(model), observe(model, seen.append):
        model(**inputs)
    return {o.layer: (o.key.shape[1], o.key.shape[3]) for o in seen}, any(
        o.is_causal or decodes(o.module) for o in seen
    )


class Distillation:
    """One run of the program: the model, its exact self, the data, and the stages.

    Args:
        accelerator: of the run.
        arguments: of the program.

    Attributes:
        whole: the model that is saved.
        model: the part of it that is switched and trained: all of it, or the encoder that hears.
        teacher: this part with exact attention.
        errors: of the hidden states after each stage.
    """

    def __init__(self, accelerator: Accelerator, arguments: DistillArguments) -> None:
        self.accelerator, self.arguments, self.folder = accelerator, arguments, Path(arguments.output_dir)
        path, processes = arguments.model_name_or_path, accelerator.num_processes
        self.whole = load_exact(path, performer=True).to(accelerator.device)
        if arguments.audio_dir is not None:
            from favor.train.speech.distill_data import Sounds, encoder_of  # its packages are those of another extra

            self.model = encoder_of(self.whole)
            self.data: Texts | Sounds = Sounds(arguments, processes)
        else:
            check_positions(self.whole, arguments.max_length)
            self.model = self.whole
            self.data = Texts(arguments, load_processor(path), processes)
        self.teacher = copy.deepcopy(self.model).eval()
        inputs = self.moved(self.data.first(1)[0])
        try:
            self.shapes, self.decoder = layers_of(self.model, inputs)
            with torch.no_grad():
                found = self.teacher(**inputs, output_hidden_states=True)
            predicts = len(found.hidden_states) > 1 and getattr(found, "logits", None) is not None
        except Exception as error:
            kind = type(self.model).__name__
            raise ValueError(f"{kind} cannot be distilled on these data: {in_one_line(error)}") from error
        if arguments.model_steps and not predicts and not arguments.hidden_weight:
            raise ValueError(f"{type(self.model).__name__} makes no predictions: set hidden_weight above 0")
        if arguments.model_steps and arguments.task_weight and self.model.get_output_embeddings() is None:
            raise ValueError(
                f"task_weight is of the words of the text, and {type(self.model).__name__} predicts none: set "
                "task_weight to 0; favor.train.glue trains classifiers on a task"
            )
        heads = sum(heads for heads, _ in self.shapes.values())
        if arguments.exact_heads >= heads:
            raise ValueError(
                f"exact_heads must be less than the {heads} key heads of the model, got {arguments.exact_heads}"
            )
        self.errors: dict[str, float] = {}

    def moved(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gives a batch on the device of the model."""
        return {name: own.to(self.accelerator.device) for name, own in batch.items()}

    def convert(self) -> str:
        """Switches the model, with parameters from their closed form; returns the statistics that it stores."""
        arguments, model = self.arguments, self.model
        family = arguments.family
        fixed = self.decoder or arguments.feature_weights or not family.needs_statistics
        kind = arguments.statistics or ("calibrated" if fixed else "corrected")
        kind = kind if family.takes_parameters else "batch"
        batches, name = self.data.first(arguments.calibration_samples), arguments.attn_implementation
        fitted_later = arguments.feature_weights and arguments.layers == "all"
        fits = kind == "calibrated" and family.needs_statistics and not fitted_later
        favor.convert(
            model,
            name,
            dataloader=batches,
            layers=arguments.layers,
            flop_budget=arguments.flop_budget,
            length=arguments.max_length if arguments.audio_dir is None else None,
            statistics="calibrated" if fits else "batch",
            **arguments.options(),
        )
        if arguments.feature_weights:
            favor.calibrate(model, batches, attn_implementation=name, feature_weights=True, **arguments.options())
        self.measure("closed form")
        return kind

    def learn_parameters(self, kind: str) -> list[float]:
        """Learns a correction of the parameters and stores the corrected ones; returns the loss of every step.

        Args:
            kind: "calibrated" or "corrected", the statistics to store.
        """
        arguments, model = self.arguments, self.model
        modules = attention_modules(model)
        _, options = layer_options(modules[min(self.shapes)], arguments.attn_implementation)
        name, own = feature_family(arguments.attn_implementation, favor.FavorConfig.from_dict(options))
        # A layer whose heads are all exact has nothing to learn.
        exact = {n: len(stored_choice(modules[n]).get("exact_heads", ())) for n in self.shapes}
        shapes = {n: shape for n, shape in self.shapes.items() if exact[n] < shape[0]}
        if not shapes or not arguments.attention_steps:
            return []
        family = families.get(name, **own)
        student = AttentionStudent(modules, family, options, shapes, arguments.learn_directions)
        seen: list[Observation] = []

        def loss(prepared: torch.nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
            seen.clear()
            model.eval()
            with torch.no_grad(), self.accelerator.autocast():
                model(**batch)
            return prepared(seen, step)

        groups: list[dict[str, Any]] = [{"params": list(student.layers.values())}]
        if arguments.learn_directions:
            groups.append({"params": list(student.directions.values()), "lr": arguments.directions_learning_rate})
        optimizer = torch.optim.Adam(groups, lr=arguments.attention_learning_rate)
        with observe(model, seen.append):
            losses, _ = self._stage("attention", arguments.attention_steps, student, optimizer, loss)
            worst = self.worst_heads(student, seen) if arguments.exact_heads else {}
        store_parameters(model, student.result(), name, kind)
        favor.configure(model, statistics=kind)
        self.measure("attention")
        if worst:
            update_choices(model, {number: {"exact_heads": heads} for number, heads in worst.items()})
            self.accelerator.print(json.dumps({"exact heads by layer": worst}))
            self.measure("exact heads")
        return losses

    def worst_heads(self, student: AttentionStudent, seen: list[Observation]) -> dict[int, list[int]]:
        """Gives the `exact_heads` key heads, by layer, that are estimated worst on the samples of the calibration.

        Args:
            student: holds the learned parameters.
            seen: is filled with what the attention layers observe, as long as they are observed.
        """
        errors: dict[tuple[int, int], float] = {}
        for inputs in map(self.moved, self.data.first(self.arguments.calibration_samples)):
            seen.clear()
            with torch.no_grad():
                self.model(**inputs)
            for layer, own in student.head_errors(seen).items():
                for head, error in enumerate(own.tolist()):
                    errors[layer, head] = errors.get((layer, head), 0.0) + error
        worst = sorted(heapq.nlargest(self.arguments.exact_heads, errors, key=errors.__getitem__))
        # All processes take the choice of the first, however theirs round.
        worst = broadcast_object_list([worst])[0]
        return {layer: [head for own, head in worst if own == layer] for layer, _ in worst}

    def learn_outputs(self) -> list[float]:
        """Trains all weights, and learned directions, so that the model matches its exact self; returns all losses."""
        arguments = self.arguments
        if not arguments.model_steps:
            return []
        weights = {name: getattr(arguments, name) for name in ("hidden_weight", "logits_weight", "task_weight")}
        teacher = Teacher(self.teacher, **weights)

        def loss(prepared: torch.nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
            prepared.eval()  # no dropout: the teacher has none
            with self.accelerator.autocast():
                return teacher.loss(prepared, batch)

        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters())}]
        directions = train_directions(self.model) if arguments.model_directions_learning_rate else []
        if directions:
            groups.append({"params": directions, "lr": arguments.model_directions_learning_rate})
        optimizer = torch.optim.AdamW(groups, lr=arguments.model_learning_rate, weight_decay=0.0, fused=True)
        losses, trained = self._stage("model", arguments.model_steps, self.model, optimizer, loss)
        self.model.load_state_dict(trained.state_dict())
        fix_directions(self.model)
        self.measure("model")
        return losses

    def _stage(
        self,
        name: str,
        steps: int,
        module: Any,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, dict[str, Tensor], int], Tensor],
    ) -> tuple[list[float], Any]:
        """Trains a module for some steps; returns the loss of every step, and the trained module or its average."""
        arguments, accelerator, folder = self.arguments, self.accelerator, self.folder / name
        is_model = name == "model"
        rate, warmup = optimizer.param_groups[0]["lr"], arguments.warmup_ratio if is_model else 0.0
        run_arguments = arguments.of_stage(str(folder), steps, rate, warmup)
        loader = self.data.loader(labels=is_model and arguments.task_weight > 0, decoder=self.decoder)
        prepared = accelerator.prepare(module.to(accelerator.device), optimizer, loader)
        bare, curve = accelerator.unwrap_model(prepared[0]), Curve()
        average = weight_average(bare, arguments.ema_decay) if is_model and arguments.ema_decay else None
        others = {"curve": curve} if average is None else {"curve": curve, "average": average}
        run = loop.start(
            accelerator, prepared, run_arguments, arguments.seed, folder, list(bare.parameters()), **others
        )
        if average is not None:
            run.after_step = lambda: average.update_parameters(bare)

        def noted(trained: Any, batch: dict[str, Tensor]) -> Tensor:
            found = loss(trained, self.data.shaped(batch, run.progress.step, steps), run.progress.step + 1)
            curve.losses.append(found.item())
            return found

        run.loss = noted
        with loop.stoppable(run):
            for epoch in loop.epochs(run, run_arguments):
                run.progress.history.append({"epoch": epoch, "step": run.progress.step})
        if arguments.checkpointing_steps and not (folder / f"checkpoint-{run.progress.step}").exists():
            checkpoint.save_checkpoint(run.states, folder, run.progress.step)
        vars(bare).pop("forward", None)  # accelerate's, which lowers the precision: errors are measured in the full one
        return curve.losses, (bare if average is None else average.module).eval()

    @torch.no_grad()
    def measure(self, stage: str) -> None:
        """Measures and prints the error of the hidden states on the samples held out, mean over layers."""
        total, samples = 0.0, self.data.held_out
        for inputs in map(self.moved, samples):
            models = (self.model.eval(), self.teacher)
            found, goal = (own(**inputs, output_hidden_states=True).hidden_states for own in models)
            pairs = zip(found[1:], goal[1:], strict=True)
            errors = [relative_squared_error(own, exact, None).sqrt() for own, exact in pairs]
            total += torch.stack(errors).mean().item() / len(samples)
        self.errors[stage] = round(total, 5)
        self.accelerator.print(json.dumps({"after": stage, "relative error of hidden states": self.errors[stage]}))


@releases_locks
def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Distils as the command line says; returns what it writes to `all_results.json`.

    Args:
        argv: the command line without the program's name. Default None: `sys.argv`.

    Raises:
        ValueError: for arguments or files that cannot be used; the message says which and why.
    """
    arguments = parse_arguments(argv)
    # The loss may not depend on a pooler or another head.
    parallel = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision, kwargs_handlers=[parallel])
    folder = Path(arguments.output_dir)
    settings = arguments.settings(accelerator.num_processes)
    there = any(checkpoint.checkpoints(folder / name) for name in ("attention", "model"))
    there = there or (folder / checkpoint.SETTINGS).exists()
    for name in ("attention", "model"):
        checkpoint.check_foreign(folder / name, overwrite=True)
    checkpoint.open_run(folder, settings, arguments.resume, arguments.overwrite_output_dir, there)
    check_model(arguments.model_name_or_path)
    if arguments.train_file is not None:
        check_text(arguments.train_file)
    if arguments.resume and (folder / RESULTS).exists():
        return checkpoint.read_json(folder / RESULTS)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for name in ("attention", "model") if arguments.overwrite_output_dir else ():
            checkpoint.clear(folder / name)
        checkpoint.start_run(folder, settings, arguments.overwrite_output_dir)
    accelerator.wait_for_everyone()
    set_seed(arguments.seed)
    started, run = time.perf_counter(), Distillation(accelerator, arguments)
    losses = run.learn_parameters(run.convert())
    model_losses = run.learn_outputs()
    results = {
        "arguments": asdict(arguments),
        "seconds": round(time.perf_counter() - started, 1),
        "samples": len(run.data),
        "errors": run.errors,
        "attention_loss": losses,
        "model_loss": model_losses,
        "layers": getattr(run.model.config, "favor_layers", None),
        "command": shlex.join(["python", "-m", NAME, *(sys.argv[1:] if argv is None else argv)]),
        "versions": report.versions(),
    }
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, run.whole, run.data.processor)
        accelerator.print(report.load_line(run.whole, folder))
        checkpoint.write_json(folder / RESULTS, results)
    accelerator.end_training()
    return results


cli = program(NAME, main)


if __name__ == "__main__":
    cli()
