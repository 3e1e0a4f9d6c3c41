"""Ways of attention in a Parakeet, and the time and memory of one pass, for `favor.eval.positions.speech`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import ParakeetEncoder, ParakeetEncoderConfig, PreTrainedModel

import favor
from favor import registry
from favor.attention.positions import Columns, far_field
from favor.eval.common.isolated import resident, resident_peak, warm_libraries
from favor.integrations.backend import register_backend
from favor.landmark import Landmarks

RATE = 100  # frames of features in a second
SIZES: dict[str, Any] = {"num_hidden_layers": 2}
# By label: backend and options. The first of each task is exact.
FEW = {"num_features": 64, "selected_keys": 128}
TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "exact (sdpa)": ("sdpa", {}),
    "landmarks": ("landmark", {}),
    "landmarks, 64 frequencies": ("landmark", {"frequencies": 64}),
    "local": ("local", {"frequencies": 0}),
}
COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "exact (sdpa)": ("sdpa", {}),
    "landmarks": ("landmark", {}),
    "landmarks, 32 frequencies": ("landmark", {"frequencies": 32}),
    "landmarks, 16 frequencies": ("landmark", {"frequencies": 16}),
    "landmarks, 8 frequencies": ("landmark", {"frequencies": 8}),
    "landmarks, M = 64, K = 128": ("landmark", FEW),
    "local": ("local", {"frequencies": 0}),
}


class Local(Landmarks):
    """Reads near keys alone, 128 before and behind and those up to the ends of their blocks: NeMo's local attention."""

    name = "local"
    backends = ("local",)  # type: ignore[assignment]


class _Nothing:
    """What is far, left out."""

    def columns(self, some: slice, ends: tuple[Tensor, Tensor]) -> Iterator[Columns]:
        return iter(())


@far_field(Local)
def nothing(*_: Any) -> _Nothing:
    """Makes no far keys."""
    return _Nothing()


def configured(model: PreTrainedModel, backend: str, options: dict[str, Any]) -> Any:
    """Switches a model, which had exact attention so far."""
    if backend == "local":
        registry.register(Local)
        register_backend("local")
    return favor.configure(model, backend, exact_below=0, **options) if backend in registry.BACKENDS else model


def pair_bytes(minutes: float) -> float:
    """Counts bytes of the biases that exact attention of one layer holds at once: 2 tensors of H x L x 2 L, float32."""
    config = ParakeetEncoderConfig(**SIZES)
    return 16.0 * config.num_attention_heads * (60 * RATE * minutes / config.subsampling_factor) ** 2


@torch.no_grad()
def measure(label: str, minutes: float, seed: int) -> dict[str, float]:
    """Measures a pass of an encoder with random weights over noise, in a fresh process.

    Returns:
        "frames" of the encoder, "seconds" and "cpu_seconds" of the pass, "bytes" by which it raises resident memory at
        its peak, and "resident", the peak of the process.
    """
    torch.manual_seed(seed)
    model = ParakeetEncoder._from_config(ParakeetEncoderConfig(**SIZES), attn_implementation="sdpa").eval()
    model = configured(model, *TIMED[label])
    frames = round(60 * RATE * minutes)
    features, mask = torch.randn(1, frames, model.config.num_mel_bins), torch.ones(1, frames, dtype=torch.long)
    model(features[:, :400], mask[:, :400])
    warm_libraries()
    resident()
    wall, cpu = time.perf_counter(), time.process_time()
    out, risen, peak = resident_peak(lambda: model(features, mask).last_hidden_state)
    found = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    if not bool(out.isfinite().all()):
        raise ArithmeticError("the output is not finite")
    return {"frames": out.shape[1], **found, "bytes": risen, "resident": peak}
