"""Gives a pretrained model linear attention that is close to its exact attention."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoTokenizer, get_scheduler

import favor
from favor import features as families
from favor.config import feature_family
from favor.integrations.adapt.observe import Observation, observe
from favor.integrations.layer import attention_modules, decodes, stored_choice
from favor.integrations.stored import store_parameters
from favor.train.common import report
from favor.train.common.checkpoint import save_pretrained, write_json
from favor.train.common.pretrained import check_model, load_exact
from favor.train.common.program import program
from favor.train.options.distill import NAME, DistillArguments, parse_arguments
from favor.train.text.attention_student import AttentionStudent
from favor.train.text.samples import check_text, samples

RESULTS = "distillation.json"


def endless(loader: Any) -> Any:
    """Yields the batches of a loader again and again, without end."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            raise ValueError("there are fewer samples than processes; give a longer text or a smaller batch")


def layers_of(model: transformers.PreTrainedModel, sample: Tensor) -> tuple[dict[int, tuple[int, int]], bool]:
    """Finds key heads and head_dim of every attention layer, and whether any layer is causal or decodes."""
    seen: list[Observation] = []
    with torch.no_grad(), observe(model.eval(), seen.append):
        model(input_ids=sample)
    return {o.layer: (o.key.shape[1], o.key.shape[3]) for o in seen}, any(
        o.is_causal or decodes(o.module) for o in seen
    )


def learn_parameters(
    accelerator: Accelerator,
    model: transformers.PreTrainedModel,
    shapes: dict[int, tuple[int, int]],
    kind: str,
    loader: Any,
    arguments: DistillArguments,
) -> list[float]:
    """Learns a correction of the parameters and stores the corrected parameters; returns the loss of every step.

    Args:
        accelerator: of the run.
        model: with linear attention.
        shapes: key heads and head_dim of every attention layer.
        kind: "calibrated" or "corrected", the statistics to store.
        loader: batches of tokens.
        arguments: steps and learning rates.
    """
    options = model.config.favor
    family, family_options = feature_family(arguments.attn_implementation, favor.FavorConfig.from_dict(options))
    modules = attention_modules(model)
    # A layer whose heads are all exact has nothing to learn.
    shapes = {n: s for n, s in shapes.items() if len(stored_choice(modules[n]).get("exact_heads", ())) < s[0]}
    if not shapes:
        return []
    features = families.get(family, **family_options)
    bare = AttentionStudent(modules, features, options, shapes).to(accelerator.device)
    optimizer = torch.optim.Adam(bare.parameters(), lr=arguments.attention_learning_rate)
    student, optimizer = accelerator.prepare(bare, optimizer)
    total = arguments.attention_steps or 0
    scheduler = get_scheduler("cosine", optimizer.optimizer, 0, total)
    seen: list[Observation] = []
    batches, losses = endless(loader), []
    model.eval()
    with observe(model, seen.append):
        steps = range(1, total + 1)
        for step in tqdm(steps, desc="attention", disable=not accelerator.is_local_main_process):
            seen.clear()
            with torch.no_grad():
                model(input_ids=next(batches))
            loss = student(seen, step)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(student.parameters(), arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(finite(loss, step))
    store_parameters(model, bare.result(), family, kind)
    favor.configure(model, statistics=kind)
    return losses


def learn_outputs(
    accelerator: Accelerator,
    model: transformers.PreTrainedModel,
    teacher: transformers.PreTrainedModel,
    loader: Any,
    arguments: DistillArguments,
) -> list[float]:
    """Trains all weights so that the outputs match those of the exact model; returns the loss of every step.

    Args:
        accelerator: of the run.
        model: with linear attention, to be trained.
        teacher: the model with exact attention.
        loader: batches of tokens.
        arguments: steps and learning rates.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.model_learning_rate, weight_decay=0.0, fused=True)
    student, optimizer = accelerator.prepare(model, optimizer)
    total = arguments.model_steps
    scheduler = get_scheduler("linear", optimizer.optimizer, math.ceil(0.1 * total), total)
    batches, losses = endless(loader), []
    student.train()
    for step in tqdm(range(1, total + 1), desc="model", disable=not accelerator.is_local_main_process):
        inputs = next(batches)
        with torch.no_grad():
            goal = teacher(input_ids=inputs)
        loss = distance(student(input_ids=inputs), goal)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(student.parameters(), arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(finite(loss, step))
    student.eval()
    return losses


def distance(output: Any, goal: Any) -> Tensor:
    """Gives the Kullback-Leibler divergence of the predictions; without logits, the relative error of hidden states."""
    if getattr(goal, "logits", None) is not None:
        log_p, log_q = goal.logits.float().log_softmax(-1), output.logits.float().log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    exact = goal.last_hidden_state
    return (output.last_hidden_state - exact).square().sum() / exact.square().sum()


def finite(loss: Tensor, step: int) -> float:
    """Gives the loss as a number.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at step {step}: lower the learning rate")
    return value


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Distils as the command line says; returns what it writes to `distillation.json`."""
    arguments = parse_arguments(argv)
    check_model(arguments.model_name_or_path)
    check_text(arguments.train_file)
    # The loss may not depend on a pooler or another head.
    parallel = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(kwargs_handlers=[parallel])
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = load_exact(arguments.model_name_or_path, performer=True).to(accelerator.device)
    teacher = copy.deepcopy(model).eval() if arguments.model_steps else None
    steps = max(arguments.attention_steps or 0, arguments.model_steps)
    size = arguments.per_device_train_batch_size
    number = max(steps * size * accelerator.num_processes, arguments.calibration_samples)
    ids = samples(arguments.train_file, tokenizer, arguments.max_length, number, arguments.seed)
    loader = accelerator.prepare(DataLoader(ids, batch_size=size, drop_last=len(ids) > size))  # type: ignore[arg-type]
    started = time.perf_counter()
    shapes, decoder = layers_of(model, ids[:1].to(accelerator.device))
    kind = arguments.statistics or ("calibrated" if decoder or arguments.feature_weights else "corrected")
    kind = kind if arguments.family.takes_parameters else "batch"
    batches, name = ids[: arguments.calibration_samples].split(1), arguments.attn_implementation
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
    learn = learn_parameters if arguments.attention_steps else lambda *_: []
    losses = learn(accelerator, model, shapes, kind, loader, arguments)
    model_losses = learn_outputs(accelerator, model, teacher, loader, arguments) if teacher is not None else []
    results = {
        "arguments": asdict(arguments),
        "seconds": round(time.perf_counter() - started, 1),
        "samples": len(ids),
        "attention_loss": losses,
        "model_loss": model_losses,
        "layers": getattr(model.config, "favor_layers", None),
    }
    if accelerator.is_main_process:
        folder = Path(arguments.output_dir)
        bare = accelerator.unwrap_model(model)
        save_pretrained(folder, bare, tokenizer)
        accelerator.print(report.load_line(bare, folder))
        write_json(folder / RESULTS, results)
        for part_of, values in (("attention", losses), ("model", model_losses)):
            if values:
                part = max(len(values) // 10, 1)
                ends = [round(sum(p) / part, 4) for p in (values[:part], values[-part:])]
                accelerator.print(json.dumps({"loss of": part_of, "first tenth": ends[0], "last tenth": ends[1]}))
    return results


cli = program(NAME, main)


if __name__ == "__main__":
    cli()
