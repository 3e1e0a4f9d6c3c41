"""Attention by landmarks as few operations of torch, for compilers, and for tensors without numbers."""

from collections import Counter

import pytest
import torch
from landmark_problem import FORMS, attend, error, inputs, with_gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import favor

forms = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
MEMORY = ("empty", "zeros", "ones", "full")  # also new_..., ..._like


class Operations(TorchDispatchMode):
    """Counts operations on tensors that torch dispatches, apart from views and from memory that is made or filled.

    An operator of favor is one operation. So is each step of a function of torch that is several operations.
    """

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **kwargs or {})
        name = operation.__name__.split(".")[0]
        makes_memory = name.removeprefix("new_").removesuffix("_like").removesuffix("_strided") in MEMORY
        is_view = operation.is_view or name in ("_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh")
        is_tensor = any(isinstance(one, torch.Tensor) for one in (out if isinstance(out, (tuple, list)) else [out]))
        if is_tensor and not makes_memory and not is_view:
            self.found[name] += 1
        return out

    @property
    def number(self):
        """How many operations there were."""
        return self.found.total()


def counted(length, steps=0, **options):
    """Operations of attention over so many tokens, or of so many single tokens after these."""
    with FakeTensorMode(), torch.no_grad():
        tensors, state = [torch.empty(2, heads, length, 16) for heads in (4, 2, 2)], favor.kernels.StreamState()
        if steps:
            options = {"is_causal": True, "state": state} | options
            attend(*tensors, **options)
        single = [tensor[:, :, :1] for tensor in tensors]
        with Operations() as found:
            for _ in range(steps or 1):
                attend(*(single if steps else tensors), **options)
    return found


# The same number at every length. One token in 64 begins a block, which then chooses.
MOST = {
    "encoder": (60, {}),
    "encoder, queries apart": (60, {"use_statistics": False}),
    "causal": (80, {"is_causal": True}),
    "64 tokens, one by one": (40 * 64, {"steps": 64}),
}


@pytest.mark.parametrize(("most", "options"), MOST.values(), ids=MOST)
def test_operations_are_few_at_every_length(most, options):
    few, many = (counted(length, **options) for length in (4096, 65536))
    assert few.number <= most, few.found
    assert many.found == few.found


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_fake_tensors_are_counted_as_real_ones(options):
    tensors = [tensor.float() for tensor in inputs(2048, width=16, value_width=16)]
    with Operations() as real, torch.no_grad():
        attend(*tensors, **options)
    assert real.found == counted(4096, **options).found


@forms
def test_compiled_in_one_graph_for_every_length(options):
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: attend(*t, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (600, 520, 345):
        tensors = inputs(length, batch=1)
        with torch._dynamo.config.patch(error_on_recompile=length != 600):
            found = with_gradients(compiled, tensors)
        for one, other in zip(found, with_gradients(lambda *t: attend(*t, **options), tensors), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


class Attention(torch.nn.Module):
    """Attention as a module, for export."""

    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return attend(query, key, value, **self.options)


@forms
def test_exported_for_every_length(options):
    tensors = tuple(inputs(600, batch=1))
    length = torch.export.Dim("length", min=2, max=2**16)
    exported = torch.export.export(Attention(options), tensors, dynamic_shapes=[{2: length}] * 3, strict=False)
    for size in (600, 345):
        tensors = inputs(size, batch=1)
        assert error(exported.module()(*tensors), attend(*tensors, **options)) < 1e-9


@pytest.mark.parametrize("options", [FORMS["encoder"], FORMS["encoder, means alone"], FORMS["causal"]], ids=str)
def test_what_is_kept_for_the_backward_pass_grows_with_the_length_alone(options):
    """No tensor of queries times keys, or times means."""
    sizes = {}
    tensors = [tensor.float().requires_grad_() for tensor in inputs(4096, batch=1, heads=2, key_heads=1)]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.setdefault(tensor.data_ptr(), tensor) is None or tensor, lambda tensor: tensor
    ):
        attend(*tensors, **options | ({} if options.get("is_causal") else {"num_features": 256}))
    # Queries of 2 heads have 2 * 4096 * 8 numbers. Blocks keep what they chose, and how often each mean counts.
    assert sum(tensor.numel() for tensor in sizes.values()) < 2 * 4096 * 8 * 12


@pytest.mark.parametrize("is_causal", [False, True])
def test_operators_are_those_that_torch_expects(is_causal):
    """Schemas, fake tensors and gradients of every operator that a call runs."""
    calls = {}

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.namespace == "favor":
                calls.setdefault(operation, (args, kwargs or {}))
            return operation(*args, **kwargs or {})

    tensors = [tensor.float().requires_grad_() for tensor in inputs(300, batch=1)]
    with Listen():
        attend(*tensors, is_causal=is_causal, selected_keys=32, num_features=12)
    assert len(calls) >= 3
    for operation, (args, kwargs) in calls.items():
        args = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        torch.library.opcheck(operation, tuple(args), kwargs)
