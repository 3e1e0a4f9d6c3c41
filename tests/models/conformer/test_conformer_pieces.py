"""Conformers whose frames are cut over two processes: losses, gradients and statistics are those of one process."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import run_several
from small_sections import set_small_sections
from tiny_speech import build

import favor
from favor.models.conformer import Chunks, ConformerForCTC, ConformerForTransducer

CASES = {
    "features": (ConformerForCTC, "favor+", {}, {}),
    "windows": (ConformerForCTC, "favor+", {"window": 4}, {}),
    "landmarks": (ConformerForCTC, "landmark", {"selected_keys": 4}, {}),
    "causal": (ConformerForTransducer, "favor+", {}, {"causal": True}),
    "causal landmarks": (ConformerForCTC, "landmark", {"selected_keys": 8}, {"causal": True}),
    "exchanged heads": (ConformerForTransducer, "favor#", {}, {"ctc_weight": 0.3}),
}
FEATURES = torch.randn(3, 80, 10, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(9).view(3, 3) % 9 + 1
# All 17 frames, none in the second piece of 9, some in both. Without a mask there are 2, and none in the second piece.
MASK = torch.arange(80) < torch.tensor([80, 30, 70])[:, None]
STILL = {"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "prediction_dropout": 0.0}


def steps(case):
    """Loss and gradients of two training passes, with padding and without, and the statistics; then what it hears."""
    kind, backend, options, changes = CASES[case]
    model = build(kind, backend, options, **STILL, **changes).train().double()
    if case == "windows":
        model.gradient_checkpointing_enable()
    losses = []
    for features, mask in ((FEATURES, MASK), (FEATURES[:, :20], None)):
        losses.append(model(input_features=features, attention_mask=mask, labels=LABELS[:, :2]).loss)
        losses[-1].backward()
    gradients = [weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in model.parameters()]
    statistics = [buffer for name, buffer in model.named_buffers() if "running" in name]
    with torch.no_grad():
        heard = model.eval().encoder(FEATURES, MASK)
    hidden = heard.last_hidden_state.masked_fill(~heard.attention_mask.unsqueeze(-1), 0)
    return [torch.stack(losses).detach(), *statistics, hidden], gradients


def compare(rank, folder):
    torch.set_num_threads(1)
    set_small_sections(pytest.MonkeyPatch())
    rendezvous = {"init_method": f"file://{folder / 'rendezvous'}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **rendezvous)  # also of an exchange that one misses
    wrong = {}
    for case in CASES:
        wanted, wanted_gradients = steps(case)
        with favor.sequence_parallel(dist.group.WORLD, heads=case == "exchanged heads"):
            found, gradients = steps(case)
        for gradient in gradients:
            dist.all_reduce(gradient)
        gradients = [gradient / 2 for gradient in gradients]
        for name, mine, alone in (("outputs", found, wanted), ("gradients", gradients, wanted_gradients)):
            scale = 1 if name == "outputs" else max(own.abs().max() for own in alone)
            error = max((one - other).abs().max() for one, other in zip(mine, alone, strict=True)) / scale
            if not error < 1e-6:  # losses are in float32
                wrong[case, name] = error.item()
    assert not wrong, wrong
    with favor.sequence_parallel(dist.group.WORLD):
        with pytest.raises(ValueError, match="a Conformer takes no exact attention: take a FAVOR backend"):
            build(ConformerForCTC)(FEATURES)
        with pytest.raises(ValueError, match="a Conformer takes no chunks"):
            build(ConformerForCTC, "favor+")(FEATURES, chunks=Chunks(4))
        with pytest.raises(ValueError, match="a Conformer takes no layerdrop"):
            build(ConformerForCTC, "favor+", layerdrop=0.1).train()(FEATURES)
    dist.destroy_process_group()


def test_two_processes_hear_as_one(tmp_path):
    run_several(compare, tmp_path)
