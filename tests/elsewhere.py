"""A device other than the CPU for machines without a GPU, to test code that must not depend on the device.

Its tensors say that they are on "meta", hold their values on the CPU, and raise an error together with tensors of the
CPU, as tensors of a GPU do. Reads by the host, for which it would have to wait on a GPU, are counted, and so are
launches: Triton kernels, which run there in Triton's interpreter, and operators that compute or copy something.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from favor.kernels import dispatch

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton kernels on the CPU, by the interpreter")
aten = torch.ops.aten
READING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
# The device of these is that of their first input; other inputs may be on any device.
MIXED = {aten.copy_.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the other device; `held` are its values."""

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, held.shape, device="meta", **layout)
        tensor.held = held
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise AssertionError(f"{operator} outside of another_device()")

    # Without these methods PyTorch treats the tensor as one of "meta" before any operator is called.
    def tolist(self):
        return self.cpu().tolist()

    def item(self):
        return self.cpu().item()

    def numpy(self, **_):
        raise TypeError("only tensors of the CPU can become arrays")

    def new_tensor(self, data, dtype=None):
        return Elsewhere(_tensor(data, dtype=dtype or self.dtype))


def _is_there(device):
    return device is not None and torch.device(device).type == "meta"


class _Dispatch(TorchDispatchMode):
    """Runs every operator on the values."""

    def __init__(self):
        super().__init__()
        self.reads = 0
        self.counts = False
        self.launches = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.counts and operator.namespace == "favor":  # what it does there
            with self:
                return OPDEFS[operator._schema.name]._init_fn(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
        goes = bool(there)
        if operator in MIXED:
            goes = isinstance(args[0], Elsewhere)
        elif there and "device" not in kwargs:
            here = [tuple(tensor.shape) for tensor in tensors if tensor.ndim and not isinstance(tensor, Elsewhere)]
            assert not here, f"{operator}: tensors of shapes {here} are not on the device of the others"
        if kwargs.get("device") is not None:
            goes = _is_there(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        self.reads += operator in READING or bool(there and not goes)
        if (goes or there) and not _is_free(operator):
            self.launches.append(operator.name().removeprefix("aten::"))
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
        same = {id(tensor.held): tensor for tensor in there}

        def wrapped(result):
            if not goes or not isinstance(result, torch.Tensor):
                return result
            return same[id(result)] if id(result) in same else Elsewhere(result)

        return tree_map(wrapped, operator(*args, **kwargs))


def _is_free(operator):
    """Whether an operator launches nothing on a GPU: it gives a view, or memory with nothing in it."""
    returned = [one.alias_info for one in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return is_view or "empty" in operator.name() or operator in (aten._unsafe_view.default, aten.detach.default)


@contextmanager
def triton_there():
    """Inside, Triton kernels are those of the other device, as on a GPU; yields what `another_device` yields."""
    run = GridExecutor.__call__

    def launch(self, *args, **kwargs):
        there.launches.append(self.fn.__name__)
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
        with torch.utils._python_dispatch._disable_current_modes():
            run(self, *args, **kwargs)

    row = replace(dispatch.TABLE["triton"], device="meta")
    with ExitStack() as stack:
        for changed in (
            patch.dict(dispatch.TABLE, triton=row),
            patch.object(dispatch, "PLAIN", (*dispatch.PLAIN, Elsewhere)),
            patch.object(dispatch, "is_in_torch_dispatch_mode", lambda: False),
            patch.object(GridExecutor, "__call__", launch),
        ):
            stack.enter_context(changed)
        there = stack.enter_context(another_device())
        there.counts = True
        yield there


_tensor, _as_tensor, _autocast = torch.tensor, torch.as_tensor, torch.autocast


@contextmanager
def another_device():
    """Inside, `tensor.to("meta")` moves to the other device. Yields an object whose `reads` counts readings."""

    def made(make):
        def on(data, *args, device=None, **kwargs):
            if isinstance(data, torch.Tensor):
                return make(data, *args, device=device, **kwargs)
            there = _is_there(device)
            tensor = make(data, *args, device=None if there else device, **kwargs)
            return tensor.to(device) if there else tensor

        return on

    def autocast(device_type, *args, **kwargs):
        return nullcontext() if device_type == "meta" else _autocast(device_type, *args, **kwargs)

    changed = {"tensor": made(_tensor), "as_tensor": made(_as_tensor), "autocast": autocast}
    with patch.multiple(torch, **changed), _Dispatch() as dispatch:
        yield dispatch


def move(model):
    """Moves parameters (tied ones stay tied) and buffers of a module to the other device, in place."""
    moved = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = moved.setdefault(parameter, torch.nn.Parameter(parameter.detach().to("meta")))
                own.requires_grad_(parameter.requires_grad)
                moved[own] = module._parameters[name] = own
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    return model
