"""Sequences that are cut over processes: groups of processes, their batches and pieces, and what is refused."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import favor
from favor.integrations.piece_length import piece_multiple
from favor.landmark.causal import BLOCK
from favor.train.common.arguments import SOFTMAX_BOUND, refuse
from favor.train.common.pretrained import positions_of

TOLERANCE = 1e-2  # of the largest output: rounding is less, and layers that miss other tokens are further away


@dataclass
class Pieces:
    """Groups of `size` processes that have the same batch, and each its piece of every sequence.

    Attributes:
        multiple: the length of a sequence is a multiple of this.
        first: position of the first token.
    """

    accelerator: Accelerator
    size: int = 1
    multiple: int = 1
    first: int = 0
    group: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Makes the groups, of consecutive processes."""
        if self.size > 1:
            shape = (self.accelerator.num_processes // self.size, self.size)
            mesh = init_device_mesh(self.accelerator.device.type, shape, mesh_dim_names=("data", "sequence"))
            self.group = mesh.get_group("sequence")

    def prepare(self, loader: Any) -> Any:
        """Prepares a loader, so that each group has its share of the batches."""
        if self.size == 1:
            return self.accelerator.prepare(loader)
        number, index = self.accelerator.num_processes // self.size, self.accelerator.process_index // self.size
        place = {"device": self.accelerator.device, "put_on_device": True}
        return prepare_data_loader(loader, num_processes=number, process_index=index, **place)

    def attention(self) -> AbstractContextManager[None]:
        """Makes attention take pieces, in forward and backward passes."""
        return nullcontext() if self.size == 1 else favor.sequence_parallel(self.group)

    def cut(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gives the piece of this process of inputs `[B, L, ...]`."""
        if self.size == 1:
            return inputs
        ids = inputs["input_ids"]
        places = self.first + torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        return favor.shard({**inputs, "position_ids": places}, self.group)

    def total(self, value: Tensor) -> Tensor:
        """Adds up a value over the processes of the group."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def gather(self, rows: Tensor) -> Tensor:
        """Gives `[size, B, ...]` for rows `[b, ...]` of each process: all samples of a batch once, of each piece."""
        state = self.accelerator.gradient_state
        every = self.accelerator.gather(rows).unflatten(0, (-1, self.size, len(rows))).transpose(0, 1).flatten(1, 2)
        # accelerate repeats samples in the last batch.
        return every[:, : state.remainder] if state.end_of_dataloader and state.remainder > 0 else every

    @torch.no_grad()
    def check(self, model: PreTrainedModel, loader: Any) -> None:
        """Raises ValueError if a model, not yet prepared, has other outputs for pieces than for whole sequences."""
        if self.size == 1:
            return
        model.to(self.accelerator.device).eval()
        few = self.multiple * math.ceil(BLOCK * self.size / self.multiple)  # so that whole sequences fit
        batch = {name: rows for name, rows in next(iter(loader)).items() if name != "labels"}
        inputs = {name: rows[:2, :few].to(model.device) for name, rows in batch.items()}
        with self.attention():
            found = model(**self.cut(inputs)).logits
        wanted, rank = model(**inputs).logits, dist.get_rank(self.group)
        if wanted.ndim == 3:
            wanted = wanted.chunk(self.size, 1)[rank]
        elif rank:  # the first process has the token of the classifier
            wanted = found
        error = self.total((found - wanted).abs().amax() / wanted.abs().amax()).item()
        if not error <= TOLERANCE:
            raise ValueError(
                f"{type(model).__name__} has other outputs for pieces of sequences than for whole ones (relative "
                f"difference {error:.1g}). Only attention may read other tokens, and a classifier the first one: leave "
                "out --sequence_parallel"
            )


def check_attention(model: PreTrainedModel, size: int) -> None:
    """Raises ValueError for exact attention, if `size` processes cut sequences."""
    name = model.config._attn_implementation
    if size > 1 and name not in favor.BACKENDS:
        raise ValueError(
            f"sequence_parallel {size} cuts sequences, and {name} attention would see a piece alone: add "
            "--attn_implementation favor+ --exact_below 0, or another of FAVOR"
        )


def pieces_of(accelerator: Accelerator, model: PreTrainedModel, options: dict[str, Any]) -> Pieces:
    """Makes the groups of processes that the options ask for.

    Args:
        accelerator, model: of the training; the model is not prepared yet.
        options: all arguments of the program.

    Raises:
        ValueError: if the model or the options need whole sequences.
    """
    size, length = options["sequence_parallel"], options["max_length"]
    if size == 1:
        return Pieces(accelerator)
    check_attention(model, size)
    config, needs, piece = model.config, f"sequence_parallel {size}", piece_multiple(model, size)
    refuse(
        (options["head_optimizer"] == SOFTMAX_BOUND, f"{needs} does not go with head_optimizer {SOFTMAX_BOUND}"),
        (options.get("teacher"), f"{needs} does not go with a teacher, which reads whole sequences"),
        (
            getattr(config, "output_router_logits", False),
            f"{needs} has no loss of routers: set output_router_logits to false in the model's config.json",
        ),
        (
            length % (size * piece),
            f"max_length must be a multiple of {size * piece}, got {length}: {needs} takes pieces of a multiple of "
            f"{piece} tokens (window, or blocks of landmarks)",
        ),
    )
    return Pieces(accelerator, size, size * piece, positions_of(model)[0])
