"""Attention by landmarks: its definition, where it is softmax attention, what holds for every form, its operations."""

from collections import Counter

import pytest
import torch
from elsewhere import interpreted
from landmark_problem import FORMS, attend, error, inputs, with_gradients
from small_sections import set_small_sections
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import favor
from favor.landmark import sorting
from favor.landmark.naive import naive_landmark_attention

forms = pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
# A causal query has closed sections of 256 tokens behind it.
LONG = 600
kernels = pytest.mark.parametrize("kernel", ["torch", pytest.param("triton", marks=interpreted)])
# The last one compiles too; Triton's operators are compiled in tests/attention/test_transforms.py, with fewer runs.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def naive(*tensors, num_features=1, **options):
    return naive_landmark_attention(*tensors, num_features, **options)


def exact(query, key, value, is_causal=False, mask=None):
    """Softmax attention in float64."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    seen = seen.tril(key.shape[2] - query.shape[2]) if is_causal else seen
    seen = seen if mask is None else seen & mask[:, None, None]
    tensors = (tensor.double() for tensor in (query, key, value))
    return scaled_dot_product_attention(*tensors, attn_mask=seen, enable_gqa=True)


def sharp(length, seed=0):
    """Each query looks at one of twelve keys, all of them among the first 200 tokens; in float64."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 1, 1, length, 32, dtype=torch.float64, generator=generator)
    seen = torch.randint(200, (12,), generator=generator)[torch.randint(12, (length,), generator=generator)]
    return 3 * key[:, :, seen], key, value


@forms
@pytest.mark.parametrize(
    "lengths", [(1, 1), (63, 63), (100, 100), (1000, 1000), (1, 700), (63, 700), (300, 900), (300, 40)]
)
def test_outputs_and_gradients_are_those_of_the_definition(options, lengths):
    if options.get("is_causal") and lengths[0] > lengths[1]:
        pytest.skip("a causal query sees its own token")
    tensors = inputs(*lengths, batch=1)
    found = with_gradients(lambda *t: attend(*t, scale=0.4, **options), tensors)
    wanted = with_gradients(lambda *t: naive(*t, scale=0.4, **options), tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_default_sizes_are_the_definition(is_causal):
    tensors = inputs(1400, batch=1, heads=2, key_heads=1, width=4)
    found = attend(*tensors, is_causal=is_causal)
    torch.testing.assert_close(found, naive(*tensors, num_features=256, is_causal=is_causal), rtol=1e-8, atol=1e-9)
    assert error(found, exact(*tensors, is_causal)) > 1e-6


# With a place for each key: selected keys, or means of encoders.
MANY = {
    "encoder": {"num_features": 1, "selected_keys": 600},
    "encoder, whole nodes": {"num_features": 7, "selected_keys": 600},
    "encoder, more than enough": {"num_features": 1000, "selected_keys": 5000},
    "encoder, means alone": {"num_features": 600, "selected_keys": 0},
    "encoder, queries apart": {"num_features": 7, "selected_keys": 600, "use_statistics": False},
    "causal": {"is_causal": True, "selected_keys": 600},
    "causal, more than enough": {"is_causal": True, "selected_keys": 5000},
}


@pytest.mark.parametrize("options", MANY.values(), ids=MANY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 63), (600, 600), (90, 600)])
def test_with_a_place_for_each_key_it_is_softmax_attention(options, lengths, dtype):
    tensors = [tensor.to(dtype) for tensor in inputs(*lengths, batch=1)]
    found = with_gradients(lambda *t: attend(*t, **options), tensors)
    is_causal = options.get("is_causal", False)
    wanted = with_gradients(lambda *t: exact(*t, is_causal), [tensor.double() for tensor in tensors])
    largest = max(tensor.norm() for tensor in wanted[1:])  # with one key, gradients of queries and keys vanish
    for place, (one, true) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == dtype
        limit = 1e-12 if dtype == torch.float64 else 2e-6 if place else 1e-6
        assert (one.double() - true).norm() <= limit * (largest if place else true.norm())


@forms
def test_the_backward_pass_can_be_repeated_and_then_frees_its_memory(options):
    tensors = [tensor.requires_grad_() for tensor in inputs(300, batch=1)]
    loss = attend(*tensors, **options).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, tensors)))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("past", [0, 21])
@pytest.mark.parametrize("selected_keys", [0, 32, 300])
def test_nothing_later_shows_in_causal_attention(selected_keys, past):
    """Bit for bit."""
    options = {"is_causal": True, "selected_keys": selected_keys}
    query, key, value = inputs(LONG, LONG + past, batch=1)
    out = attend(query, key, value, **options)
    for now in (1, 48, 255, 256, 320, 513, LONG - 1):
        later = [tensor.clone() for tensor in (query, key, value)]
        for tensor, first in zip(later, (now, past + now, past + now), strict=True):
            tensor[:, :, first:] = 50 * torch.randn_like(tensor[:, :, first:])
        changed = attend(*later, **options)
        assert torch.equal(changed[:, :, :now], out[:, :, :now])
        assert not torch.allclose(changed[:, :, now:], out[:, :, now:])


def test_padded_queries_attend_as_they_do_in_softmax_attention():
    """Models that mix tokens after attention, such as Conformers, see what padding attends to."""
    tensors, mask = inputs(40), (torch.arange(40) < 29).expand(2, -1)
    found = attend(*tensors, key_padding_mask=mask, selected_keys=40, num_features=4)
    torch.testing.assert_close(found, exact(*tensors, mask=mask))


def test_padding_behind_the_last_queries_has_no_effect():
    """Fewer queries than keys: the place of the first query depends on how many of them are padding."""
    tensors, mask = inputs(70, LONG), (torch.arange(LONG) < torch.tensor([[LONG], [LONG - 30]]))
    found = attend(*tensors, key_padding_mask=mask, **FORMS["causal"])
    alone = attend(*(tensor[1:, :, : tensor.shape[2] - 30] for tensor in tensors), **FORMS["causal"])
    torch.testing.assert_close(found[1:, :, :40], alone)


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_that_matter_are_found(is_causal):
    """Reading them is far better than means alone, and than as many keys by chance."""
    tensors, length = sharp(1000), 1000
    options, section = {"num_features": 100, "is_causal": is_causal}, torch.arange(length) // 256
    by_chance = torch.rand(length, length, generator=torch.Generator().manual_seed(1)) < 0.128
    if is_causal:
        by_chance = (by_chance | (section[:, None] == section)).tril()
    outs = [attend(*tensors, selected_keys=number, **options) for number in (128, 0)]
    outs.append(scaled_dot_product_attention(*tensors, attn_mask=by_chance))
    truth = exact(*tensors, is_causal)
    found, *others = (error(out[:, :, 256:], truth[:, :, 256:]) for out in outs)
    assert found < 0.5 * min(others)


def test_alike_keys_are_neighbours_in_the_order():
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(20, 32, dtype=torch.float64, generator=generator)
    query, key = (topics[torch.randint(20, (600,), generator=generator)] for _ in range(2))
    key = key + 0.1 * torch.randn(key.shape, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([600])
    order = sorting.order_of(key[None], query[None, None], lengths, lengths)
    assert torch.equal(order.sort().values, torch.arange(600))
    near, far = ((rows[:-1] - rows[1:]).norm(dim=-1).mean() for rows in (key[order], key))
    assert near < 0.3 * far


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


def test_compiled_in_one_graph_for_every_length():
    """With gradients; programs of encoders are exported in tests/integrations."""
    options = FORMS["causal"]
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: attend(*t, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (600, 345):
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


@pytest.mark.parametrize("options", [FORMS["encoder, queries apart"], FORMS["causal"]], ids=["encoder", "causal"])
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


@pytest.mark.filterwarnings("default")
@kernels
@pytest.mark.parametrize("is_causal", [False, True], ids=["encoder", "causal"])
def test_operators_are_those_that_torch_expects(is_causal, kernel, monkeypatch):
    """Schemas, fake tensors and gradients of every operator that a call runs."""
    set_small_sections(monkeypatch)
    calls = {}

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.namespace == "favor":
                calls.setdefault(operation, (args, kwargs or {}))
            return operation(*args, **kwargs or {})

    tensors = [tensor.float().requires_grad_() for tensor in inputs(20, batch=1, heads=2, key_heads=1)]
    with Listen():
        attend(*tensors, kernel=kernel, is_causal=is_causal, num_features=4, selected_keys=6).sum().backward()
    assert len(calls) >= 2, calls
    for operation, (args, kwargs) in calls.items():
        args = tree_map(lambda arg: arg.detach().clone() if isinstance(arg, torch.Tensor) else arg, args)
        if operation.name().endswith("_attention"):  # query, key and value; what chooses has no gradient
            args = (*(arg.requires_grad_() for arg in args[:3]), *args[3:])
        torch.library.opcheck(operation, tuple(args), kwargs, test_utils=CHECKS[: None if kernel == "torch" else 3])
