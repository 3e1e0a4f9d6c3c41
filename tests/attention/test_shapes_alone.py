"""Tensors that have a shape and no numbers: on "meta", and fake ones; and torch.jit.trace, which is refused."""

import pytest
import torch
from reference import FAMILIES, attend, inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import favor

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODELS = {"encoder": lambda: BertModel(BertConfig(**SIZES)), "decoder": lambda: LlamaForCausalLM(LlamaConfig(**SIZES))}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # it reads them all
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
