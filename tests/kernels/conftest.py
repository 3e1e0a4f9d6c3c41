"""Runs Triton kernels on a GPU if there is one, else in Triton's interpreter; and can fill new memory with NaN."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def _as_bfloat16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.uint16).numpy()


def _as_float32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(autouse=True, scope="session")
def bfloat16_in_the_interpreter():
    """Makes the interpreter round to nearest and multiply values; else it truncates and multiplies bits as integers."""
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def round_to_nearest(self, source, target):
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_as_bfloat16(source.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_as_float32(source.data), tl.float32)
        return cast(self, source, target)

    def multiply(self, left, right, *rest):
        if left.dtype.scalar == tl.bfloat16:
            left, right = (interpreter.TensorHandle(_as_float32(x.data), tl.float32) for x in (left, right))
        return dot(self, left, right, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "cast_impl", round_to_nearest)
        patch.setattr(builder, "create_dot", multiply)
        yield


@pytest.fixture(autouse=True)
def device_of_the_kernel(request):
    """Makes tensors on the device of the kernels: a GPU for tests with "triton" in their name, if there is one."""
    on_gpu = torch.cuda.is_available() and "triton" in request.node.nodeid
    with torch.device("cuda" if on_gpu else "cpu"):
        torch.empty(0)  # torch now lists what makes tensors, before `poisoned` replaces some of it
        yield


@pytest.fixture
def poisoned(monkeypatch):
    """Fills tensors that torch makes uninitialised with NaN (integers: with 99)."""

    def poison(tensor):
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

    def replace(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: poison(original(*args, **kwargs)))

    replace(torch, "empty")
    replace(torch, "empty_like")
    replace(torch.Tensor, "new_empty")
