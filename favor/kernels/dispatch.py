"""Which kernel runs: Triton on CUDA, plain torch elsewhere, unless one is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_WIDEST = 256
_WIDEST_FUSED = 128
# Bytes, those of compute capability 8.0, for which all configurations of the kernels are compiled and checked.
_SHARED_MEMORY = 163 * 1024
PLAIN = (Tensor, torch.nn.Parameter)  # types of ordinary tensors
_logger = logging.getLogger("favor.kernels")


@dataclass(frozen=True)
class Kernel:
    """A row of the table of kernels.

    Attributes:
        package: its modules, each with the name of a form. `bidirectional`, `causal` and `window` have
            `forward(operands, geometry)` and `backward(grad, operands, geometry, saved, for_directions)`, `decode` has
            `summarise` and `decode`, and `chosen` the operators of `favor.kernels.chosen`.
        device: type of the devices on which "auto" takes it; empty for the kernel that runs where no other does.
        problem: why it cannot run on such a device, None if it can.
        unfit: why it does not take such queries and values, None if it does.
        trains_directions: whether `backward` gives gradients of directions and offset. If not, the torch kernel does,
            with directions rounded to the type of the tokens, as they were in the forward pass.
        result: what is special about its results, keywords of `favor.kernels.operands.Result.empty`.
    """

    package: str
    device: str = ""
    problem: Callable[[str], str | None] = lambda device: None
    unfit: Callable[[Tensor, Tensor], str | None] = lambda query, value: None
    trains_directions: bool = True
    result: dict[str, bool] = field(default_factory=dict)


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
            f"the GPU has {shared // 1024} KB of shared memory per program, and the kernels need "
            f"{_SHARED_MEMORY // 1024} KB, which A100, H100 and later GPUs for data centers have"
        )
    return None


TABLE = {
    "torch": Kernel("favor.kernels.eager"),
    "triton": Kernel(
        "favor.kernels.gpu",
        device="cuda",
        problem=_triton_problem,
        unfit=_unfit,
        trains_directions=False,
        result={"joins_heads": True, "keeps_lse": True, "rounds_summaries": True},
    ),
}
KERNELS = ("auto", *TABLE)


def available() -> dict[str, str]:
    """Says of each kernel whether it can run here.

    Returns:
        "torch" and "triton", each with "available" or the reason why not, and "auto" with the kernel that
        `kernel="auto"` picks for tensors on the best device of this machine.

    Example:
        >>> import favor
        >>> favor.kernels.available()["torch"]
        'available'
    """
    problems = {name: row.problem(row.device) for name, row in TABLE.items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    auto = [name for name, row in TABLE.items() if problems[name] is None and row.device == device]
    return {**{name: problem or "available" for name, problem in problems.items()}, "auto": [*auto, "torch"][0]}


def pick(kernel: str, query: Tensor, value: Tensor) -> str:
    """Names the kernel to run, "torch" or "triton", for tensors like `query` and `value`.

    Raises:
        ValueError: if a kernel is asked for that cannot run, saying why, or for an unknown name.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNELS))}; got {kernel!r}.")
    device = query.device.type
    for name, row in TABLE.items():
        if kernel == name or (kernel == "auto" and row.device == device):
            problem = row.problem(device) or row.unfit(query, value)
            if problem is None:
                return name
            if kernel == name:
                raise ValueError(f'kernel="{name}" cannot run: {problem}. Use kernel="auto" or "torch".')
            _report(name, problem)
    return "torch"


@cache
def kernel_module(picked: str, form: str) -> Any:
    """Imports the module of one form of a kernel when it is first used: triton need not be installed."""
    return importlib.import_module(f"{TABLE[picked].package}.{form}")


def operator(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *mutated: str) -> Any:
    """Makes an operator of PyTorch, opaque to compilers; `fake` gives what `run` gives, for tensors without numbers."""
    made = torch.library.custom_op(f"favor::{name}", run, mutates_args=mutated, schema=schema)
    made.register_fake(fake)
    return made


def is_tracing(*tensors: Tensor) -> bool:
    """Tells whether the contents of tensors must not be read: something traces them, or they have none.

    A compiler, a CUDA graph and torch.func trace; tensors on "meta" and fake ones have a shape only.
    """
    if torch.compiler.is_compiling() or is_transformed() or any(map(has_shape_only, tensors)):
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_exporting() -> bool:
    """Tells whether torch.export traces. The public function also says so of torch.compile, in torch 2.11."""
    return torch.compiler._is_exporting_flag


def has_shape_only(tensor: Tensor) -> bool:
    """Tells whether a tensor has no contents: one on "meta", or a fake one."""
    return is_fake(tensor) or (type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "meta")


def check_not_scripted() -> None:
    """Raises a ValueError inside torch.jit.trace, which would freeze what attention decides for one input."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        raise ValueError(
            "torch.jit.trace and the older ONNX exporter (dynamo=False) cannot record favor attention, which takes "
            "decisions by the input; use torch.export.export, or torch.onnx.export(dynamo=True)."
        )


def is_transformed() -> bool:
    """Tells whether a transform of torch.func is active, such as `grad` or `vmap`."""
    return torch._C._are_functorch_transforms_active()


def plain(*tensors: Tensor | None) -> bool:
    """Tells whether these are ordinary tensors that nothing, such as a compiler, watches."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or is_transformed():
        return False
    return all(type(tensor) in PLAIN and tensor is not None and not has_shape_only(tensor) for tensor in tensors)


def on_cpu(tensor: Tensor) -> bool:
    """Tells whether this is an ordinary tensor on a CPU: numpy can read it, and reading it needs no waiting."""
    return tensor.device.type == "cpu" and plain(tensor)


def fuses(rows: Tensor) -> bool:
    """Tells whether a pass over tokens outside of the kernels can be a Triton kernel too; a compiler makes its own."""
    fits = (
        rows.ndim == 4
        and rows.dtype != torch.float64
        and rows.shape[-1] <= _WIDEST_FUSED
        and rows.stride(-1) == 1
        and rows.numel() > 0
    )
    return plain(rows) and fits and pick("auto", rows, rows) == "triton"


@cache
def _report(kernel: str, problem: str) -> None:
    _logger.warning("favor: using the torch kernel instead of %s: %s.", kernel.capitalize(), problem)
