"""Which kernel runs: Triton on CUDA, plain torch elsewhere, unless one is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Each has `forward(operands, geometry)` and `backward(grad, operands, geometry, saved, for_directions)`.
_MODULES = {
    "torch": {
        "bidirectional": "favor.kernels.eager.bidirectional",
        "causal": "favor.kernels.eager.causal",
        "window": "favor.kernels.eager.window",
    },
    "triton": {
        "bidirectional": "favor.kernels.gpu.bidirectional",
        "causal": "favor.kernels.gpu.causal.op",
        "window": "favor.kernels.gpu.window.op",
    },
}
KERNELS = ("auto", *_MODULES)
_WIDEST = 256
_WIDEST_FUSED = 128
# Bytes, those of compute capability 8.0, for which all configurations of the kernels are compiled and checked.
_SHARED_MEMORY = 163 * 1024
_logger = logging.getLogger("favor.kernels")


def available() -> dict[str, str]:
    """The kernels, and whether each can run here.

    Returns:
        "torch" and "triton", each with "available" or the reason why not, and "auto" with the kernel that
        `kernel="auto"` picks for tensors on the best device of this machine.
    """
    problem = _triton_problem("cuda")
    auto = "triton" if problem is None and torch.cuda.is_available() else "torch"
    return {"torch": "available", "triton": problem or "available", "auto": auto}


def pick(kernel: str, query: Tensor, value: Tensor) -> str:
    """Name of the kernel to run, "torch" or "triton", for tensors like `query` and `value`.

    Raises:
        ValueError: if Triton is asked for and cannot run, saying why, or for an unknown name.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNELS))}; got {kernel!r}.")
    if kernel == "torch" or (kernel == "auto" and query.device.type != "cuda"):
        return "torch"
    problem = _triton_problem(query.device.type) or _unfit(query, value)
    if problem is None:
        return "triton"
    if kernel == "triton":
        raise ValueError(f'kernel="triton" cannot run: {problem}. Use kernel="auto" or "torch".')
    _report(problem)
    return "torch"


@cache
def kernel_module(picked: str, is_causal: bool, window: int) -> Any:
    """The module with `forward` and `backward` of a kernel, imported when it is first used: triton may be missing."""
    form = "window" if window else "causal" if is_causal else "bidirectional"
    return importlib.import_module(_MODULES[picked][form])


def triton_module(name: str) -> Any:
    """A module of Triton kernels, imported when it is first used: triton need not be installed."""
    return importlib.import_module(f"favor.kernels.gpu.{name}")


def is_tracing() -> bool:
    """Whether what tensors hold is not to be looked at: a compiler or a CUDA graph records what is done to them."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors and nobody, such as a compiler, watches what is done to them."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


def fuses(rows: Tensor) -> bool:
    """Whether a pass over tokens outside of the kernels can be one Triton kernel, too; a compiler makes its own."""
    fits = (
        rows.ndim == 4
        and rows.dtype != torch.float64
        and rows.shape[-1] <= _WIDEST_FUSED
        and rows.stride(-1) == 1
        and rows.numel() > 0
    )
    return plain(rows) and fits and pick("auto", rows, rows) == "triton"


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as every kernel can read them, with rows in one piece; copied only where they are not."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _unfit(query: Tensor, value: Tensor) -> str | None:
    if query.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    width = max(query.shape[-1], value.shape[-1])
    return f"it takes widths up to {_WIDEST}, got {width}" if width > _WIDEST else None


@cache
def _triton_problem(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"the tensors are on {device}, not on a CUDA device"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    shared = min(getattr(one, "shared_memory_per_block_optin", _SHARED_MEMORY) for one in devices)
    if shared < _SHARED_MEMORY:
        return (
            f"the GPU has {shared // 1024} KB of shared memory a program, and the kernels need "
            f"{_SHARED_MEMORY // 1024} KB, which A100, H100 and later GPUs for data centers have"
        )
    return None


@cache
def _report(problem: str) -> None:
    _logger.warning("favor: using the torch kernel instead of Triton: %s.", problem)
