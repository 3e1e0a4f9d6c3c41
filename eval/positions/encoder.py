"""An encoder of T5 with random weights: what `favor.eval.positions.text` measures in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5EncoderModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5 import modeling_t5

import favor
from favor.eval.common.isolated import release_early, resident_peak, warm_libraries

SEED = 0
SHAPE: dict[str, Any] = {}  # the defaults of T5Config are t5-small
BACKENDS = ("eager", "sdpa", "landmark", "favor+")
FEW = 128  # tokens of a first pass, which fills buffers of libraries
BUDGET, MOST_PASSES = 2.0, 4  # seconds that all passes should take, after the first, and their number


def build(backend: str) -> T5EncoderModel:
    """Makes the encoder, with equal weights for every backend."""
    torch.manual_seed(SEED)
    model = T5EncoderModel(T5Config(**SHAPE)).eval()
    if backend in favor.BACKENDS:
        favor.configure(model, backend, exact_below=0)
    else:
        model.set_attn_implementation(backend)
    return model


def tokens(length: int) -> Tensor:
    """Draws tokens `[1, length]`."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(2, T5Config(**SHAPE).vocab_size, (1, length), generator=generator)


class Clock:
    """Sums wall-clock and processor seconds of functions."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.process_time() - cpu

        return call


@contextmanager
def attention_clock(backend: str) -> Iterator[Clock]:
    """Times what T5 calls for its attention between projections, and what makes the biases of its positions."""
    clock, makes_bias = Clock(), modeling_t5.T5Attention.compute_bias
    attends = ALL_ATTENTION_FUNCTIONS.get(backend, modeling_t5.eager_attention_forward)
    ALL_ATTENTION_FUNCTIONS[backend] = clock.around(attends)
    modeling_t5.T5Attention.compute_bias = clock.around(makes_bias)  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        del ALL_ATTENTION_FUNCTIONS[backend]
        modeling_t5.T5Attention.compute_bias = makes_bias  # type: ignore[method-assign]


@torch.no_grad()
def measure_time(backend: str, length: int) -> dict[str, list[float]]:
    """Measures seconds of passes: of the whole encoder, and of its attention; wall-clock and processor time.

    The first pass counts only if it takes longer than all should.
    """
    model, ids = build(backend), tokens(length)
    model(ids[:, :FEW])
    warm_libraries()
    found: dict[str, list[float]] = {"wall": [], "cpu": [], "attention_wall": [], "attention_cpu": []}
    while len(found["cpu"]) < 2 or (sum(found["cpu"]) < BUDGET and len(found["cpu"]) <= MOST_PASSES):
        whole = Clock()
        with attention_clock(backend) as own:
            hidden = whole.around(model)(ids).last_hidden_state
        if not bool(hidden.isfinite().all()):
            raise ArithmeticError("hidden states are not finite")
        del hidden
        for name, seconds in zip(found, (whole.wall, whole.cpu, own.wall, own.cpu), strict=True):
            found[name].append(seconds)
        if found["cpu"][0] > BUDGET:
            return found
    return {name: seconds[1:] for name, seconds in found.items()}


@torch.no_grad()
def measure_memory(backend: str, length: int) -> dict[str, int]:
    """Measures by how many bytes the memory of the process rises in one pass, "peak"."""
    release_early()
    model, ids = build(backend), tokens(length)
    model(ids[:, :FEW])
    warm_libraries()
    return {"peak": resident_peak(lambda: model(ids).last_hidden_state)[1]}
