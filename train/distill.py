r"""Gives a pretrained model linear attention that is close to its exact attention.

    accelerate launch -m favor.train.distill --model_name_or_path DIR --train_file book.txt \
        --attn_implementation favor# --num_features 256 --window 128 --output_dir out/linear

The stages, in one folder:

1. The parameters of the estimator come from a closed form.
2. `attention_steps` steps learn a correction of them, and directions in the place of random ones: each layer is
   compared with exact attention on its own queries, keys and values. The weights of the model do not change. With
   `exact_heads`, the heads that are estimated worst afterwards keep exact attention.
   `--feature_weights` replaces this stage: it learns weights of the features, and parameters for exactly the directions
   that the model will use (`favor.calibrate`).
3. `model_steps` steps train all weights, and the learned directions, so that hidden states and predictions match those
   of the exact model, with `task_weight` also on the words of the text themselves.

With `--audio_dir` the model is one that hears, such as a Whisper or a Conformer: its encoder alone is switched and
learns from recordings.

After each stage the program prints the error of the hidden states on samples that are held out. Samples may
have several lengths (`--lengths`), or be pairs of texts (`--pair_probability`). A run that
was stopped continues with `--resume`, to the same weights. `from_pretrained` loads the output folder.
"""

from __future__ import annotations

import copy
import heapq
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, set_seed
from torch import Tensor

import favor
from favor import features as families
from favor import registry
from favor.config import feature_family
from favor.integrations.adapt.observe import Observation, observe
from favor.integrations.layer import attention_modules, layer_options, stored_choice
from favor.integrations.stored import fix_directions, store_parameters, train_directions, update_choices
from favor.train.common import checkpoint, loop
from favor.train.common.arguments import FREE, FolderArguments, RunArguments, option, refuse
from favor.train.common.lock import releases_locks
from favor.train.common.pretrained import check_positions, load_exact
from favor.train.common.program import DataclassParser, load_line, of_program, program
from favor.train.common.teacher import AttentionStudent, Teacher, layers_of, relative_squared_error
from favor.train.text.distill_data import Texts
from favor.train.text.samples import check_text
from favor_command.program import in_one_line
from favor_command.saved import check_model, load_processor

if TYPE_CHECKING:
    from favor.train.speech.loaders import Sounds

NAME = "favor.train.distill"
STAGES = ("attention", "model")  # folders of their checkpoints
CALIBRATION_SAMPLES = 8  # samples from which the closed form is computed
# Peak learning rates in the attention steps: of the corrections, and of the directions of each head.
ATTENTION_LEARNING_RATE, DIRECTIONS_LEARNING_RATE = 3e-3, 5e-2
MODEL_DIRECTIONS_LEARNING_RATE = 5e-3  # peak learning rate of learned directions in the model steps
WARMUP_RATIO = 0.1  # warm-up of the model steps, as a fraction of them


@dataclass(kw_only=True)
class DistillArguments(FolderArguments):
    """Model, text, attention and schedule."""

    model_name_or_path: str = option(MISSING, "Hub name or folder of a pretrained model.")
    train_file: str | None = option(None, "Text to learn from: UTF-8, plain, .gz or .xz.")
    audio_dir: str | None = option(
        None, "Instead of a text: recordings, in LibriSpeech's layout, with manifests, or a folder of audio files."
    )
    split: str | None = option(None, "Split of audio_dir; several are joined by +. Default: all of the folder.")
    attn_implementation: str = option(
        "favor#", "FAVOR backend: favor#, favor++, favor+ or landmark.", choices=registry.BACKENDS
    )
    num_features: int = option(256, "Random features, or means of landmarks in encoders, per head.")
    features: str | None = option(None, "Features of favor#. Default wderf.")
    window: int = option(0, "Tokens of a block in which attention is exact; 0: none. Not for landmark.")
    selected_keys: int | None = option(
        None, "Keys that each block of queries reads exactly, for landmark. Default: 768, in causal layers 1,024."
    )
    layers: str = option(
        "all",
        "all, or auto: heads that cannot be estimated stay exact, within flop_budget; with landmarks, layers take the "
        "numbers of selected keys with the smallest errors, or stay exact.",
    )
    flop_budget: float = option(
        0.5, "Operations of attention, as a fraction of those of exact attention, for --layers auto."
    )
    max_length: int = option(512, "Tokens of a sample.", above=0)
    lengths: list[int] | None = option(
        None, "Tokens of the samples of a step, drawn from these. Default: max_length.", above=0
    )
    pair_probability: float = option(
        0.0,
        "Part of the samples that are two texts, as in tasks on pairs of sentences: the second begins inside the first "
        "or right after it, and shares words with it.",
        least=0,
        most=1,
    )
    per_device_train_batch_size: int = option(2, "Samples per process and step.", above=0)
    feature_weights: bool = option(
        False, "Learn weights of the features (with favor#, also parameters that go with them)."
    )
    attention_steps: int | None = option(
        None,
        "Steps of learning the parameters of the estimator. Default 300; none with feature_weights or landmarks.",
        least=0,
    )
    learn_directions: bool = option(
        True, "The attention steps also learn the directions of each head, in the place of random ones."
    )
    exact_heads: int = option(
        0,
        "After the attention steps, this many key heads of the whole model keep exact attention, with their query "
        "heads: those that are estimated worst on the calibration samples. A decoder with exact heads cannot run with "
        "a cache of constant size.",
        least=0,
    )
    model_steps: int = option(0, "Steps that train the whole model to match the exact one. Default 0: none.", least=0)
    model_learning_rate: float = option(2e-5, "Peak learning rate of the model steps.")
    hidden_weight: float = option(
        1.0, "Weight of the relative squared error of the hidden states in the model steps.", least=0
    )
    logits_weight: float = option(1.0, "Weight of the divergence of predictions, if the model makes any.", least=0)
    task_weight: float = option(
        0.0,
        "Weight of the model's own loss: next words, or masked ones (15 %), which the teacher sees masked too.",
        least=0,
    )
    ema_decay: float = option(
        0.0, "Decay of an average of the weights in the model steps, which is saved; 0: none.", least=0, below=1
    )
    seed: int = option(0, "Seed of the order of samples, dropout and random features.")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        landmarks, weights = self.family.selects_keys, self.feature_weights
        if self.attention_steps is None:
            self.attention_steps = 0 if weights or landmarks else 300
        steps, exact, heard = self.attention_steps, self.exact_heads, self.audio_dir is not None
        of_text = ("lengths", "pair_probability", "task_weight")
        learns = self.family.needs_statistics or weights or (self.learn_directions and steps)
        refuse(
            ((self.train_file is not None) == heard, "give a text, train_file, or recordings, audio_dir: one of them"),
            (
                heard and any(getattr(self, name) for name in of_text),
                f"{', '.join(of_text)} are for text: leave them out with audio_dir",
            ),
            (self.split is not None and not heard, "split is of recordings: add audio_dir"),
            (
                max(self.lengths or [0]) > self.max_length,
                f"lengths must be at most max_length, {self.max_length}, got {self.lengths}",
            ),
            (
                self.model_steps and not (self.hidden_weight or self.logits_weight),
                "hidden_weight and logits_weight are both 0, so nothing of the exact model is matched: set one above "
                "0, or train on text with favor.train.mlm or favor.train.clm",
            ),
            (
                landmarks and (steps or weights),
                "landmarks have no parameters to learn: leave out attention_steps and feature_weights; model_steps "
                "trains the model",
            ),
            (
                weights and steps,
                "feature_weights learns calibrated parameters for fixed directions: leave out attention_steps",
            ),
            (
                exact and (landmarks or weights or not steps),
                "exact_heads are chosen after the attention steps, which landmarks and feature_weights do not have: "
                "leave exact_heads out, or set attention_steps above 0",
            ),
            (
                exact and self.layers == "auto",
                "layers auto chooses exact heads itself: leave exact_heads out, or set layers to all",
            ),
            (
                not landmarks and not (learns and self.family.supports_window),
                "attn_implementation must be favor#, favor++ or landmark, or favor+ with learn_directions or "
                f"feature_weights, got {self.attn_implementation!r}",
            ),
        )

    @property
    def family(self) -> Any:
        """The family that the backend runs."""
        return registry.family_of(self.attn_implementation, self.features)

    def settings(self, num_processes: int) -> dict[str, Any]:
        """Gives the options that the result depends on."""
        kept = {name: value for name, value in asdict(self).items() if name not in FREE}
        return kept | {"num_processes": num_processes}

    def options(self) -> dict[str, Any]:
        """Gives the options of the backend."""
        names = ("num_features", "features", "window", "selected_keys", "seed")
        return {name: getattr(self, name) for name in names} | {"exact_below": 0}


def parse_arguments(words: Sequence[str] | None) -> DistillArguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return DataclassParser(NAME, __doc__, [DistillArguments]).parse(words)[0]


class Distillation:
    """One run of the program: the model, its exact self, the data, and the stages.

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
            from favor.train.speech.loaders import Sounds, encoder_of  # its packages are those of another extra

            self.model = encoder_of(self.whole)
            self.data: Texts | Sounds = Sounds(arguments, processes)
        else:
            check_positions(self.whole, arguments.max_length)
            self.model = self.whole
            self.data = Texts(arguments, load_processor(path), processes, CALIBRATION_SAMPLES)
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
        kind = ("calibrated" if fixed else "corrected") if family.takes_parameters else "batch"
        batches, name = self.data.first(CALIBRATION_SAMPLES), arguments.attn_implementation
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

        The `kind` of the stored statistics is "calibrated" or "corrected".
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

        directions = {"params": list(student.directions.values()), "lr": DIRECTIONS_LEARNING_RATE}
        groups: list[dict[str, Any]] = [{"params": list(student.layers.values())}]
        groups += [directions] if arguments.learn_directions else []
        optimizer = torch.optim.Adam(groups, lr=ATTENTION_LEARNING_RATE)
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

        The student holds the learned parameters; `seen` is filled with what the attention layers observe.
        """
        errors: dict[tuple[int, int], float] = {}
        for inputs in map(self.moved, self.data.first(CALIBRATION_SAMPLES)):
            seen.clear()
            with torch.no_grad():
                self.model(**inputs)
            for layer, own in student.head_errors(seen).items():
                for head, error in enumerate(own.tolist()):
                    errors[layer, head] = errors.get((layer, head), 0.0) + error
        worst = sorted(heapq.nlargest(self.arguments.exact_heads, errors, key=errors.__getitem__))
        worst = broadcast_object_list([worst])[0]  # all processes take the choice of the first, however theirs round
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
        if directions := train_directions(self.model):
            groups.append({"params": directions, "lr": MODEL_DIRECTIONS_LEARNING_RATE})
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
        given, accelerator, folder = self.arguments, self.accelerator, self.folder / name
        is_model = name == "model"
        arguments = RunArguments(
            output_dir=str(folder),
            max_train_steps=steps,
            warmup_ratio=WARMUP_RATIO if is_model else 0.0,
            checkpointing_steps=given.checkpointing_steps,
            resume=given.resume,
        )
        loader = self.data.loader(labels=is_model and given.task_weight > 0, decoder=self.decoder)
        prepared = accelerator.prepare(module.to(accelerator.device), optimizer, loader)
        bare = accelerator.unwrap_model(prepared[0])
        decay = given.ema_decay if is_model else 0.0
        run = loop.start(accelerator, prepared, arguments, given.seed, folder, list(bare.parameters()), decay)
        shaped, progress = self.data.shaped, run.progress
        run.loss = lambda trained, batch: loss(trained, shaped(batch, progress.step), progress.step + 1)
        with loop.stoppable(run):
            for epoch in loop.epochs(run):
                progress.history.append({"epoch": epoch, "step": progress.step})
        if given.checkpointing_steps and not (folder / f"checkpoint-{progress.step}").exists():
            checkpoint.save_checkpoint(run.states, folder, progress.step)
        vars(bare).pop("forward", None)  # accelerate's, which lowers the precision: errors are measured in the full one
        return progress.losses, run.trained.eval()

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
    folder, overwrite = Path(arguments.output_dir), arguments.overwrite_output_dir
    settings = arguments.settings(accelerator.num_processes)
    there = (folder / checkpoint.SETTINGS).exists()
    for stage in STAGES:
        there = there or bool(checkpoint.checkpoints(folder / stage))
        checkpoint.check_foreign(folder / stage, overwrite=True)
    checkpoint.open_run(folder, settings, arguments.resume, overwrite, there)
    check_model(arguments.model_name_or_path)
    if arguments.train_file is not None:
        check_text(arguments.train_file)
    if arguments.resume and (folder / checkpoint.RESULTS).exists():
        return checkpoint.read_json(folder / checkpoint.RESULTS)
    checkpoint.start_run(folder, settings, overwrite, STAGES)
    set_seed(arguments.seed)
    started, run = time.perf_counter(), Distillation(accelerator, arguments)
    losses = run.learn_parameters(run.convert())
    model_losses = run.learn_outputs()
    results = of_program(NAME, argv, asdict(arguments)) | {
        "seconds": round(time.perf_counter() - started, 1),
        "samples": len(run.data),
        "errors": run.errors,
        "attention_loss": losses,
        "model_loss": model_losses,
        "layers": getattr(run.model.config, "favor_layers", None),
    }
    if accelerator.is_main_process:
        checkpoint.save_pretrained(folder, run.whole, run.data.processor)
        accelerator.print(load_line(run.whole, folder))
        checkpoint.write_json(folder / checkpoint.RESULTS, results)
    accelerator.end_training()
    return results


cli = program(NAME, main, several=True)


if __name__ == "__main__":
    cli()
