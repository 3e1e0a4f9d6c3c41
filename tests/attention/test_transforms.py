"""Attention on tensors without numbers (meta, fake), compiled, and in `torch.func`; torch.jit.trace is refused."""

import pytest
import torch
from elsewhere import interpreted
from graphs import Graphs
from reference import FAMILIES, attend, inputs
from small_sections import set_small_sections
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import favor
from favor.features import Parameters

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = {"encoder": lambda: BertModel(BertConfig(**SIZES)), "decoder": lambda: LlamaForCausalLM(LlamaConfig(**SIZES))}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # it reads them all
    # PyTorch has no batching rules for its own fused attention, which landmarks use, and says so.
    pytest.mark.filterwarnings("ignore:.*would let its tokens see later ones:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


def passed(name, tensors, mask, is_causal):
    """Runs both passes; gives shapes and types of the output and of the gradients; some operations are counted."""
    tensors = [tensor.requires_grad_() for tensor in tensors]
    with FlopCounterMode(display=False) as counter:
        out = attend(*tensors, name=name, mask=mask, is_causal=is_causal)
        out.sum().backward()
    found = [out, *(tensor.grad for tensor in tensors)]
    assert counter.get_total_flops() > 0 or tensors[0].device.type == "cpu"  # whose own attention is not counted
    return [(tensor.shape, tensor.dtype) for tensor in found]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_are_those_of_tensors_with_numbers(name, is_causal):
    """Also with padding, whose places cannot be known; and nothing fake is kept for later calls."""
    tensors, mask = inputs(20, batch=1), torch.ones(1, 20, dtype=torch.bool)
    mask[0, :1] = False
    expected = passed(name, [tensor.clone() for tensor in tensors], mask, is_causal)
    assert passed(name, [tensor.to("meta") for tensor in tensors], mask.to("meta"), is_causal) == expected
    with FakeTensorMode():
        fake = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        assert passed(name, fake, torch.empty(mask.shape, dtype=torch.bool), is_causal) == expected
    assert passed(name, [tensor.clone() for tensor in tensors], mask, is_causal) == expected


FORMS = [
    *((name, {}) for name in ("trig", "gerf", "sderf", "wderf@64", "landmark+6")),  # one of each path
    *((name, {"is_causal": True}) for name in ("pos@64", "relu", "landmark+6")),
    ("sderf", {"parameters": 0.6, "is_causal": True}),
    *(
        pytest.param(name, {"kernel": "triton", "parameters": own, "is_causal": causal}, marks=interpreted)
        for name, own, causal in (("sderf", 0.6, True), ("landmark+6", None, False), ("landmark+6", None, True))
    ),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_compiled_in_one_graph_without_a_look_at_tensors(name, options, monkeypatch):
    """Forward and backward, so that a CUDA graph can record both; and the results are the same."""
    torch.compiler.reset()
    set_small_sections(monkeypatch)
    graphs, options = Graphs(), {"num_features": 4, **options}
    if options.get("parameters"):
        options["parameters"] = Parameters(torch.eye(8), torch.eye(8), options["parameters"] * torch.eye(8))

    def both(compiled):
        leaves = inputs(70 if "@" in name else 20, batch=1, heads=2, key_heads=1)
        leaves = [tensor.float().requires_grad_() for tensor in leaves]
        out = compiled(*leaves)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    def run(*tensors):
        return attend(*tensors, name=name, **options)

    found, wanted = both(torch.compile(run, fullgraph=True, dynamic=False, backend=graphs)), both(run)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    graphs.check(2)


def test_operations_of_the_kernels_are_those_of_their_products():
    """Four products for features, and two for each exact pair, with two operations each."""
    counted = {}
    for options in (
        {"features": "pos"},
        {"features": "pos", "window": 5},
        {"features": "landmark", "selected_keys": 6},
    ):
        query, key, value = (torch.empty(1, 2, 20, 4, device="meta") for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            favor.favor_attention(query, key, value, num_features=10, **options)
        for operator, number in counter.get_flop_counts()["Global"].items():
            counted[str(operator), len(options)] = number
    product = 2 * 2 * 20 * 4  # of all rows of the two heads with one vector
    assert counted["favor.linear_attention", 1] == product * 10 * 4
    assert counted["favor.linear_attention", 2] == product * (10 * 4 + 5 * 2)
    assert counted["favor.chosen_attention", 2] == product * 32 // 20 * (10 + 6) * 2  # in two blocks of 16 queries


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("backend", ["favor+", "favor#", "landmark", "favor_relu"])
def test_models_on_meta(kind, backend):
    if kind == "decoder" and backend == "favor_relu":
        backend = "favor_elu"
    with torch.device("meta"):
        model = favor.configure(MODELS[kind](), backend, exact_below=0)
        ids = torch.ones(2, 30, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            out = model(ids, attention_mask=torch.ones_like(ids))[0]
            out.sum().backward()
    assert out.shape == (2, 30, 16 if kind == "encoder" else 40)
    assert counter.get_total_flops() > 0


@pytest.mark.parametrize("exact_below", [0, "auto"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_and_calls_cannot_be_traced_by_jit(kind, exact_below):
    model, ids = favor.configure(MODELS[kind]().eval(), "favor+", exact_below=exact_below), torch.ones(1, 20).long()
    for given in ((ids,), (ids, torch.ones_like(ids))):
        with pytest.raises(ValueError, match=r"use torch\.export\.export"):
            torch.jit.trace(model, given, strict=False)
    with pytest.raises(ValueError, match=r"use torch\.export\.export"):
        torch.jit.trace(lambda *tensors: favor.favor_attention(*tensors, features="landmark"), tuple(inputs(20)))


TRANSFORMED = ["pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "trig", "relu", "elu"]


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, 20, 4, dtype=torch.float64, generator=generator) for shape in shapes]


def padding():
    place = torch.arange(20)
    return torch.stack([place >= 0, place < 13, place >= 5])


def loss(query, key, value, mask=None, **options):
    return favor.favor_attention(query, key, value, num_features=8, key_padding_mask=mask, **options).square().sum()


def by_autograd(inputs, mask, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(loss(*leaves, mask, **options), leaves)


def of_one(query, key, value, mask=None, **options):
    return loss(query[None], key[None], value[None], None if mask is None else mask[None], **options)


CASES = [
    *((name, {}) for name in TRANSFORMED),
    *((name, {"is_causal": True}) for name in ("pos", "relu")),
    ("landmark", {"selected_keys": 0}),
    *((name, {"window": 4, "is_causal": causal}) for name in ("pos", "wderf") for causal in (False, True)),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("features", "options"), CASES)
def test_grad_and_gradients_of_single_samples(features, options, masked):
    options, mask = {"features": features, **options}, padding() if masked else None
    inputs = tensors((3, 4), (3, 2), (3, 2))
    wanted = by_autograd(inputs, mask, **options)
    found = torch.func.grad(lambda *args: loss(*args, mask, **options), argnums=(0, 1, 2))(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    each = torch.func.grad(lambda *args: of_one(*args, **options), argnums=(0, 1, 2))
    alone = torch.func.vmap(each)(*inputs, *([] if mask is None else [mask]))
    torch.testing.assert_close(alone, wanted, rtol=1e-6, atol=1e-8)


def test_jacrev():
    inputs = tensors((1, 2), (1, 2), (1, 2))

    def attend(*args):
        return favor.favor_attention(*args, features="wderf", num_features=8)[0, 0, 3]

    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    rows = [torch.autograd.grad(number, leaves, retain_graph=True) for number in attend(*leaves)]
    wanted = tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    torch.testing.assert_close(torch.func.jacrev(attend, argnums=(0, 1, 2))(*inputs), wanted)


def test_vmap_over_values_alone_and_over_parameters():
    query, key, value = tensors((1, 2), (1, 2), (5, 2))
    found = torch.func.vmap(lambda v: favor.favor_attention(query, key, v[None], features="pos", num_features=8))(value)
    for own, one in zip(found, value, strict=True):
        torch.testing.assert_close(own, favor.favor_attention(query, key, one[None], features="pos", num_features=8))
    factors = torch.eye(4, dtype=torch.float64) * torch.tensor([1.0, 1.1, 1.2])[:, None, None, None]

    def of(factor):
        eye = torch.eye(4, dtype=torch.float64).expand_as(factor)
        parameters = Parameters(eye, eye, factor)
        return loss(query, key, value[:1], features="sderf", parameters=parameters)

    found = torch.func.vmap(torch.func.grad(of))(factors.expand(3, 2, 4, 4))
    for own, factor in zip(found, factors, strict=True):
        leaf = factor.expand(2, 4, 4).clone().requires_grad_()
        torch.testing.assert_close(own, torch.autograd.grad(of(leaf), leaf)[0])


def test_second_derivatives_are_refused():
    query, key, value = tensors((1, 2), (1, 2), (1, 2))

    def total(q):
        return torch.func.grad(lambda q: loss(q, key, value, features="pos"))(q).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        torch.func.grad(total)(query)
