"""Sequences that are cut over four processes: outputs and gradients are those of one process."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from processes import run_several
from small_sections import set_small_sections
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import favor
from favor.attention import parallel
from favor.kernels.operands import Operands
from favor.kernels.ops import attention_and_normaliser

LENGTH, PIECES = 256, 4
# Features, key heads for four heads, whether causal, padding (whole pieces in one row), and further options.
END, START = slice(150, None), slice(100)
CASES = [
    ("pos", 2, False, END, {}),
    ("pos", 2, True, None, {}),
    ("pos", 2, False, END, {"window": 32}),
    ("pos", 2, True, END, {"window": 64}),
    ("sderf", 2, False, END, {}),
    ("landmark", 2, True, END, {"selected_keys": 16}),
    ("landmark", 4, True, END, {"selected_keys": 16}),
    ("landmark", 4, False, END, {"selected_keys": 16}),
    ("landmark", 4, True, START, {"selected_keys": 16}),
    ("landmark", 4, False, START, {"selected_keys": 16}),
]


def inputs_of(case):
    features, key_heads, is_causal, padding, options = case
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, LENGTH, 8, generator=generator) for heads in (4, key_heads, key_heads, 4)]
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    if padding is not None:
        mask[0, padding] = False
    return tensors, mask, {"features": features, "is_causal": is_causal, "num_features": 16, **options}


def attend(case, some=slice(None)):
    """Gives output and gradients for a piece of the tokens."""
    (*tensors, weight), mask, options = inputs_of(case)
    tensors = [tensor[:, :, some].clone().requires_grad_() for tensor in tensors]
    out = favor.favor_attention(*tensors, **options, key_padding_mask=mask[:, some])
    rows = mask[:, None, some, None]
    (out * weight[:, :, some] * rows).sum().backward()
    return [out.detach() * rows, *(tensor.grad for tensor in tensors)]


def gathering_late(calls):
    """Replaces `all_gather` by one that gives NaN until it is waited for; notes what is called."""
    gather, attend_near = torch.no_grad()(dist.all_gather), parallel.attention_and_normaliser

    def start(parts, tensor, group, async_op):
        calls.append("start")
        for part in parts:
            part.fill_(torch.nan if part.is_floating_point() else 255)
        return SimpleNamespace(wait=lambda: (calls.append("wait"), gather(parts, tensor, group=group)))

    def near(*args, **options):
        calls.append("near")
        return attend_near(*args, **options)

    return patch.object(dist, "all_gather", start), patch.object(parallel, "attention_and_normaliser", near)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20))
    return favor.configure(model, "favor+", exact_below=0, num_features=8)


def trained(model, batch, group=None):
    """Gives the weights after some steps of plain gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    if group is not None:  # layers run again in the backward pass, and exchange again
        model.gradient_checkpointing_enable()
    for _ in range(20):
        model(**batch, num_items_in_batch=100).loss.backward()
        for parameter in model.parameters() if group is not None else ():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def in_two_ways(ids):
    """Heads are exchanged in pairs of processes; pairs hold pieces of sequences, or heads by tensor parallelism."""
    pairs, own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), dist.get_rank()
    with torch.no_grad():
        wanted = llama().model(ids).last_hidden_state
        with favor.sequence_parallel(pairs["outer"]), favor.sequence_parallel(pairs["inner"], heads=True):
            found = llama().model(**favor.shard({"input_ids": ids}, dist.group.WORLD)).last_hidden_state
        assert (found - wanted.chunk(PIECES, 1)[own]).abs().max() < 1e-5
        model = llama()
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        for layer in model.model.layers:
            parallelize_module(layer, pairs["outer"], {**plan, "self_attn.o_proj": RowwiseParallel()})
        with favor.sequence_parallel(pairs["inner"], heads=True):
            found = model.model(**favor.shard({"input_ids": ids}, pairs["inner"])).last_hidden_state
    assert (found - wanted.chunk(2, 1)[own % 2]).abs().max() < 1e-5


def in_pieces(rank, address):
    torch.set_num_threads(1)
    set_small_sections(pytest.MonkeyPatch())
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=PIECES)
    group, some = dist.group.WORLD, slice(rank * LENGTH // PIECES, (rank + 1) * LENGTH // PIECES)
    for case in CASES:
        wanted = attend(case)
        late, noted = gathering_late(calls := [])
        with favor.sequence_parallel(group), late, noted:
            found = attend(case, some)
        if case[0] != "landmark" and (case[2] or "window" in case[4]):
            assert calls[-3:] == ["start", "near", "wait"]  # own keys while the states of others are on their way
        for own, whole in zip(found, wanted, strict=True):
            error = (own - whole[:, :, some]).abs().max() / whole.abs().max()
            assert error < 1e-5, (case, error)
    ids = torch.randint(0, 20, (2, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    wanted = trained(llama(), batch)
    with favor.sequence_parallel(group):
        found = trained(llama(), favor.shard(batch, group, is_causal=True), group)
        exact = favor.configure(llama(), exact_below=100)
        with pytest.raises(ValueError, match=r"Set exact_below=0 \(it is 100\)"):
            exact(ids)
        query = torch.randn(1, 2, 8, 4)
        with pytest.raises(ValueError, match="there are 2 for 4 processes"):
            favor.favor_attention(query, query, query, features="landmark")
        with pytest.raises(ValueError, match="no cache or state"):
            favor.favor_attention(query[:, :, :1], query, query, features="pos", is_causal=True)
        for case in (("landmark", 2, True, START, {"selected_keys": 16}), ("pos", 2, False, START, {"window": 32})):
            with pytest.raises(ValueError, match="take padding at the end of sequences alone"):
                attend(case, some)
    assert (found - wanted).abs().max() < 1e-4
    in_two_ways(ids)
    dist.destroy_process_group()


def test_pieces_are_the_whole(tmp_path):
    run_several(in_pieces, f"file://{tmp_path / 'rendezvous'}", number=PIECES)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": 4}, {"window": 4, "is_causal": True}])
def test_the_normaliser_has_gradients(options):
    torch.manual_seed(0)
    shapes = ((1, 2, 10, 3), (1, 1, 10, 3), (1, 1, 10, 3), (1, 1, 4, 3), (1, 1, 4, 3), (1, 1, 4), (1, 1, 10))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = torch.randn(1, 2, 10, dtype=torch.float64, requires_grad=True)

    def attend(*given):
        operands = Operands(*given) if "window" in options else Operands(*given[:-1])
        return attention_and_normaliser(operands, "auto", **options, scale=0.5)[:2]

    assert torch.autograd.gradcheck(attend, (*tensors, bias), fast_mode=True)
