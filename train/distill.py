r"""Gives a pretrained model linear attention that is close to its exact attention.

    accelerate launch -m favor.train.distill --model_name_or_path DIR --train_file book.txt \
        --attn_implementation favor# --num_features 256 --window 128 --output_dir out/linear

Three steps, each optional but the first: parameters of the estimator in closed form; `attention_steps` of learning a
correction of them, each layer against exact attention on the same queries, keys and values, while the weights of the
model stay as they are; `model_steps` of training all weights so that the outputs of the whole model match those of the
exact one. `--feature_weights` takes the place of the second: weights of the features, and parameters for the very
directions the model will use, see `favor.calibrate`. The folder loads with `from_pretrained`.
"""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import asdict, dataclass, field
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
from favor import registry
from favor.config import feature_family
from favor.integrations.adapt.observe import Observation, observe
from favor.integrations.layer import attention_modules, decodes, stored_choice
from favor.integrations.stored import store_parameters
from favor.train.common import report
from favor.train.common.arguments import check_positive, option
from favor.train.common.checkpoint import save_pretrained, write_json
from favor.train.common.pretrained import check_model, load_exact
from favor.train.common.program import DataclassParser, did_you_mean, program
from favor.train.text.attention_student import AttentionStudent
from favor.train.text.samples import check_text, samples

NAME = "favor.train.distill"
RESULTS = "distillation.json"


@dataclass
class DistillArguments:
    """Model, text, attention and schedule."""

    model_name_or_path: str = field(metadata={"help": "Hub name or folder of a pretrained model."})
    train_file: str = field(metadata={"help": "Text to learn from: UTF-8, plain, .gz or .xz."})
    output_dir: str = field(metadata={"help": "Folder of the distilled model."})
    attn_implementation: str = option("favor#", "FAVOR backend: favor#, favor++, or favor+ with feature_weights.")
    num_features: int = option(256, "Random features a head.")
    features: str | None = option(None, "Features of favor#; their closed form is the start. Default wderf.")
    window: int = option(0, "Exact attention inside blocks of so many tokens.")
    exact_below: str = option("0", "Exact attention for fewer tokens than this: a number, or auto.")
    layers: str = option("all", "all, or auto: heads that cannot be estimated stay exact, within flop_budget.")
    flop_budget: float = option(0.5, "Operations of attention as a fraction of exact attention's, for --layers auto.")
    max_length: int = option(512, "Tokens of a sample.")
    statistics: str | None = option(
        None, "corrected: a correction of each sequence's parameters (default of encoders); calibrated: fixed ones."
    )
    per_device_train_batch_size: int = option(2, "Samples a process and a step.")
    calibration_samples: int = option(8, "Samples behind the closed form.")
    feature_weights: bool = option(
        False, "Learn weights of the features (with favor#, and parameters to go with them)."
    )
    attention_steps: int | None = option(
        None, "Steps of learning the parameters of the estimator. Default 300; none with feature_weights or landmarks."
    )
    attention_learning_rate: float = option(5e-4, "Peak learning rate of these, with a cosine schedule.")
    model_steps: int = option(0, "Steps of training the whole model against the exact one; 0 (default) for none.")
    model_learning_rate: float = option(2e-5, "Peak learning rate of these, with warm-up and a linear schedule.")
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm.")
    seed: int = option(0, "Of the order of samples, dropout and random features.")

    def __post_init__(self) -> None:
        """Checks what argparse cannot; raises ValueError."""
        check_positive(self, "max_length", "per_device_train_batch_size", "calibration_samples")
        if self.feature_weights and (self.attention_steps or self.statistics == "corrected"):
            raise ValueError(
                "feature_weights learns calibrated parameters for fixed directions: without attention_steps and with "
                "statistics calibrated"
            )
        if self.attn_implementation not in registry.BACKENDS:
            known = ", ".join(registry.BACKENDS)
            raise ValueError(
                f"attn_implementation must be one of {known}; got {self.attn_implementation!r}"
                + did_you_mean(self.attn_implementation.lower(), registry.BACKENDS)
            )
        landmarks = not self.family.takes_parameters
        if landmarks and (self.attention_steps or self.feature_weights or self.statistics):
            raise ValueError(
                "landmarks have no parameters to learn: without attention_steps, feature_weights and statistics; "
                "model_steps trains the model"
            )
        if self.attention_steps is None:
            self.attention_steps = 0 if self.feature_weights or landmarks else 300
        for name in ("attention_steps", "model_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        learns = landmarks or self.family.needs_statistics or self.feature_weights
        if not (learns and self.family.supports_window):
            raise ValueError(
                "attn_implementation must be favor#, favor++ or landmark, or favor+ with feature_weights, got "
                f"{self.attn_implementation!r}"
            )
        if self.statistics == "corrected" and not self.attention_steps:
            raise ValueError("statistics corrected is what attention_steps learn; set attention_steps above 0")
        if self.statistics not in (None, "calibrated", "corrected"):
            raise ValueError(f"statistics must be calibrated or corrected, got {self.statistics!r}")
        if self.exact_below != "auto" and not self.exact_below.isdecimal():
            raise ValueError(f"exact_below must be a number of tokens or auto, got {self.exact_below!r}")

    @property
    def family(self) -> type[registry.Family]:
        """The family that the backend runs."""
        return registry.family_of(self.attn_implementation, self.features)

    def options(self) -> dict[str, Any]:
        """Options of the backend."""
        exact_below: int | str = "auto" if self.exact_below == "auto" else int(self.exact_below)
        names = ("num_features", "features", "window", "seed")
        return {name: getattr(self, name) for name in names} | {"exact_below": exact_below}


def endless(loader: Any) -> Any:
    """Batches of a loader, again and again."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            raise ValueError("there are fewer samples than processes; give a longer text or a smaller batch")


def layers_of(model: transformers.PreTrainedModel, sample: Tensor) -> tuple[dict[int, tuple[int, int]], bool]:
    """Key heads and head_dim of every attention layer, and whether the queries of any must not see each other."""
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
    """Learns a correction of the parameters and stores what comes of it; returns the loss of every step."""
    options = model.config.favor
    family, family_options = feature_family(arguments.attn_implementation, favor.FavorConfig.from_dict(options))
    modules = attention_modules(model)
    # Layers that stay exact altogether have nothing to learn.
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
    """Trains all weights so that the outputs match those of the exact model; returns the loss of every step."""
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
    """Kullback-Leibler divergence of the predictions where there are logits, else relative error of hidden states."""
    if getattr(goal, "logits", None) is not None:
        log_p, log_q = goal.logits.float().log_softmax(-1), output.logits.float().log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    exact = goal.last_hidden_state
    return (output.last_hidden_state - exact).square().sum() / exact.square().sum()


def finite(loss: Tensor, step: int) -> float:
    """The loss as a number.

    Raises:
        FloatingPointError: if it is not finite.
    """
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at step {step}: lower the learning rate")
    return value


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Distils as the command line says; returns what it writes to `distillation.json`."""
    (arguments,) = DataclassParser(NAME, __doc__, [DistillArguments]).parse(argv)
    check_model(arguments.model_name_or_path)
    check_text(arguments.train_file)
    # A pooler or another head may have no part in the loss.
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
