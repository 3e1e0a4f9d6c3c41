"""Packed batches: every sequence as if it were alone."""

import pytest
import torch
from reference import FAMILIES, attend, inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k")
ROWS = [7, 1, 30, 0, 12]


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("columns", [ROWS, [9, 4, 30, 2, 12]], ids=["self", "cross"])
def test_a_packed_sequence_is_as_if_it_were_alone(name, is_causal, columns):
    if "@" in name and not is_causal and columns is not ROWS:
        pytest.skip("cross attention has no window")
    packed = [t.requires_grad_() for t in inputs(sum(ROWS), sum(columns), batch=1, scale=0.5)]
    alone = [t.detach().clone().requires_grad_() for t in packed]
    lengths = {"cu_seqlens_q": cumulative(ROWS), "cu_seqlens_k": cumulative(columns)}
    out = attend(*packed, name=name, is_causal=is_causal, **lengths)
    parts = zip(*(t.split(n, 2) for t, n in zip(alone, (ROWS, columns, columns), strict=True)), strict=True)
    expected = torch.cat([attend(*part, name=name, is_causal=is_causal) for part in parts], dim=2)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for tensors, result in ((packed, out), (alone, expected)):
        (result * torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)).sum().backward()
        assert all(t.grad.isfinite().all() for t in tensors)
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k": None}, "go together"),
        ({"cu_seqlens_k": torch.tensor([0, 10, 20, 37])}, "same sequences, got 2 and 3"),
        ({"cu_seqlens_q": torch.tensor([0, 40])}, r"from 0 to 37, got \[0, 40\]"),
        (
            {"cu_seqlens_q": torch.tensor([0.0, 10, 37])},
            r"lengths \[0, ..., 37\] as integers",
        ),
        ({"mask": torch.ones(1, 37, dtype=torch.bool)}, "no padding"),
        ({"cu_seqlens_k": torch.tensor([0, 30, 37]), "is_causal": True}, "at least as many keys as queries in every"),
        ({"batch": 2}, "batch of size 1, got 2"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    tensors = inputs(37, batch=change.pop("batch", 1))
    lengths = dict.fromkeys(LENGTHS, torch.tensor([0, 10, 37]))
    with pytest.raises(ValueError, match=message):
        attend(*tensors, name="pos", **lengths | change)
