"""Gives a pretrained model linear attention that is close to its exact attention."""

from __future__ import annotations

import copy
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor
from transformers import AutoTokenizer

import favor
from favor import features as families
from favor.config import feature_family
from favor.integrations.adapt.observe import Observation, observe
from favor.integrations.layer import attention_modules, decodes, stored_choice
from favor.integrations.stored import store_parameters
from favor.train.common import checkpoint, loop, report
from favor.train.common.average import weight_average
from favor.train.common.pretrained import check_model, check_positions, load_exact
from favor.train.common.program import program
from favor.train.common.teacher import Teacher, relative_squared_error
from favor.train.options.distill import NAME, DistillArguments, parse_arguments
from favor.train.text.attention_student import AttentionStudent
from favor.train.text.distill_data import Texts
from favor.train.text.samples import check_text

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


def layers_of(model: transformers.PreTrainedModel, sample: Tensor) -> tuple[dict[int, tuple[int, int]], bool]:
    """Finds key heads and head_dim of every attention layer, and whether any layer is causal or decodes."""
    seen: list[Observation] = []
    with torch.no_grad(), observe(model.eval(), seen.append):
        model(input_ids=sample)
    return {o.layer: (o.key.shape[1], o.key.shape[3]) for o in seen}, any(
        o.is_causal or decodes(o.module) for o in seen
    )


class Distillation:
    """One run of the program: the model, its exact self, the text, and the stages.

    Args:
        accelerator: of the run.
        arguments: of the program.
    """

    def __init__(self, accelerator: Accelerator, arguments: DistillArguments) -> None:
        self.accelerator, self.arguments, self.folder = accelerator, arguments, Path(arguments.output_dir)
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
        self.model = load_exact(arguments.model_name_or_path, performer=True).to(accelerator.device)
        check_positions(self.model, arguments.max_length)
        self.teacher = copy.deepcopy(self.model).eval()
        self.texts = Texts(arguments, self.tokenizer, accelerator.num_processes)
        self.shapes, self.decoder = layers_of(self.model, self.texts.ids[:1].to(accelerator.device))
        self.errors: dict[str, float] = {}

    def convert(self) -> str:
        """Switches the model, with parameters from their closed form; returns the statistics that it stores."""
        arguments, model = self.arguments, self.model
        kind = arguments.statistics or ("calibrated" if self.decoder or arguments.feature_weights else "corrected")
        kind = kind if arguments.family.takes_parameters else "batch"
        batches, name = self.texts.ids[: arguments.calibration_samples].split(1), arguments.attn_implementation
        fitted_later = arguments.feature_weights and arguments.layers == "all"
        favor.convert(
            model,
            name,
            dataloader=batches,
            layers=arguments.layers,
            flop_budget=arguments.flop_budget,
            length=arguments.max_length,
            statistics="calibrated" if kind == "calibrated" and not fitted_later else "batch",
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
        options, modules = model.config.favor, attention_modules(model)
        name, own = feature_family(arguments.attn_implementation, favor.FavorConfig.from_dict(options))
        # A layer whose heads are all exact has nothing to learn.
        exact = {n: len(stored_choice(modules[n]).get("exact_heads", ())) for n in self.shapes}
        shapes = {n: shape for n, shape in self.shapes.items() if exact[n] < shape[0]}
        if not shapes or not arguments.attention_steps:
            return []
        student = AttentionStudent(modules, families.get(name, **own), options, shapes)
        seen: list[Observation] = []

        def loss(prepared: torch.nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
            seen.clear()
            model.eval()
            with torch.no_grad():
                model(**batch)
            return prepared(seen, step)

        optimizer = torch.optim.Adam(student.parameters(), lr=arguments.attention_learning_rate)
        with observe(model, seen.append):
            losses, _ = self._stage("attention", arguments.attention_steps, student, optimizer, loss)
        store_parameters(model, student.result(), name, kind)
        favor.configure(model, statistics=kind)
        self.measure("attention")
        return losses

    def learn_outputs(self) -> list[float]:
        """Trains all weights so that the model matches its exact self; returns the loss of every step."""
        arguments = self.arguments
        if not arguments.model_steps:
            return []
        weights = {name: getattr(arguments, name) for name in ("hidden_weight", "logits_weight", "task_weight")}
        teacher = Teacher(self.teacher, **weights)

        def loss(prepared: torch.nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
            prepared.eval()  # no dropout: the teacher has none
            return teacher.loss(prepared, batch)

        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=arguments.model_learning_rate, weight_decay=0.0, fused=True
        )
        losses, self.model = self._stage("model", arguments.model_steps, self.model, optimizer, loss)
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
        loader = self.texts.loader(labels=is_model and arguments.task_weight > 0, decoder=self.decoder)
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
            found = loss(trained, self.texts.shortened(batch, run.progress.step / steps), run.progress.step + 1)
            curve.losses.append(found.item())
            return found

        run.loss = noted
        with loop.stoppable(run):
            for epoch in loop.epochs(run, run_arguments):
                run.progress.history.append({"epoch": epoch, "step": run.progress.step})
        if arguments.checkpointing_steps and not (folder / f"checkpoint-{run.progress.step}").exists():
            checkpoint.save_checkpoint(run.states, folder, run.progress.step)
        return curve.losses, (bare if average is None else average.module).eval()

    @torch.no_grad()
    def measure(self, stage: str) -> None:
        """Measures and prints the error of the hidden states on the samples held out, mean over layers."""
        total, samples = 0.0, self.texts.held_out.to(self.accelerator.device).split(1)
        model = self.accelerator.unwrap_model(self.model).eval()
        for ids in samples:
            found, goal = (own(input_ids=ids, output_hidden_states=True).hidden_states for own in (model, self.teacher))
            pairs = zip(found[1:], goal[1:], strict=True)
            errors = [relative_squared_error(own, exact, None).sqrt() for own, exact in pairs]
            total += torch.stack(errors).mean().item() / len(samples)
        self.errors[stage] = round(total, 5)
        self.accelerator.print(json.dumps({"after": stage, "relative error of hidden states": self.errors[stage]}))


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
    accelerator, folder = Accelerator(kwargs_handlers=[parallel]), Path(arguments.output_dir)
    settings = arguments.settings(accelerator.num_processes)
    there = any(checkpoint.checkpoints(folder / name) for name in ("attention", "model"))
    there = there or (folder / checkpoint.SETTINGS).exists()
    checkpoint.open_run(folder, settings, arguments.resume, arguments.overwrite_output_dir, there)
    check_model(arguments.model_name_or_path)
    check_text(arguments.train_file)
    if arguments.resume and (folder / RESULTS).exists():
        return checkpoint.read_json(folder / RESULTS)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for name in ("attention", "model") if arguments.overwrite_output_dir else ():
            checkpoint.remove(folder / name)
        checkpoint.start_run(folder, settings, arguments.overwrite_output_dir)
    accelerator.wait_for_everyone()
    set_seed(arguments.seed)
    started, run = time.perf_counter(), Distillation(accelerator, arguments)
    losses = run.learn_parameters(run.convert())
    model_losses = run.learn_outputs()
    model = accelerator.unwrap_model(run.model)
    results = {
        "arguments": asdict(arguments),
        "seconds": round(time.perf_counter() - started, 1),
        "samples": len(run.texts.ids),
        "errors": run.errors,
        "attention_loss": losses,
        "model_loss": model_losses,
        "layers": getattr(model.config, "favor_layers", None),
        "command": shlex.join(["python", "-m", NAME, *(sys.argv[1:] if argv is None else argv)]),
        "versions": report.versions(),
    }
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, model, run.tokenizer)
        accelerator.print(report.load_line(model, folder))
        checkpoint.write_json(folder / RESULTS, results)
    accelerator.end_training()
    return results


cli = program(NAME, main)


if __name__ == "__main__":
    cli()
