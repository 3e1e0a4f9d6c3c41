"""How often a call makes a GPU start something: Triton kernels and operators of PyTorch, and never a wait.

Tensors are those of another device (tests/elsewhere.py), whose Triton kernels run in the interpreter.
"""

import sys

import pytest
import torch
from elsewhere import triton_there
from small_sections import set_small_sections

import favor
from favor.kernels import StreamState

# Options of a call, and launches at most: forward, backward.
BUDGETS = {
    "pos": ({}, 4, 6),
    "pos, padding": ({"is_padded": True}, 5, 7),
    "pos, grouped": ({"heads": (2, 1)}, 4, 6),
    "pos, causal": ({"is_causal": True}, 5, 9),
    "pos, window": ({"window": 16}, 5, 8),
    "pos, causal window": ({"window": 16, "is_causal": True}, 5, 8),
    "gerf": ({}, 6, 6),
    "gerf, padding": ({"is_padded": True}, 7, 7),
    "saderf": ({}, 6, 6),
    "aderf": ({}, 6, 6),
    "sderf": ({}, 6, 6),
    "sderf, window": ({"window": 16}, 8, 8),
    "cderf": ({}, 6, 6),
    "wderf": ({}, 7, 6),
    "wderf, padding": ({"is_padded": True}, 8, 7),
    "wderf, window": ({"window": 16}, 8, 8),
    "aderf, calibrated": ({"is_calibrated": True}, 5, 6),
    "sderf, calibrated": ({"is_calibrated": True}, 5, 6),
    "wderf, calibrated": ({"is_calibrated": True}, 5, 6),
    "landmark": ({"selected_keys": 6}, 11, 3),
    "landmark, causal": ({"selected_keys": 6, "is_causal": True}, 7, 3),
    "wderf, calibrated, causal": ({"is_calibrated": True, "is_causal": True}, 6, 9),
}


LENGTHS = ("pos", "pos, causal", "pos, window", "wderf", "landmark", "landmark, causal")


def make(length, device, dtype, features, *, batch=1, heads=(1, 1), is_padded=False, is_calibrated=False, **options):
    """Tokens and options of a call."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, number, 16) for number in (heads[0], heads[1], heads[1])]
    tokens = [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]
    options["features"] = features
    if is_padded:
        mask = torch.arange(length) < torch.tensor([[length], [length - 7]])[-batch:]
        options["key_padding_mask"] = mask.to(device)
    if is_calibrated:
        samples = torch.randn(2, heads[1], 40, 16, generator=generator) / 2
        fitted = favor.features.get(features).fit(*samples)._each(torch.Tensor.contiguous)
        options["parameters"] = fitted.to(torch.empty(0).to(device))
    return [token.to(device, dtype).requires_grad_() for token in tokens], options


def launches(length, *, dtype=torch.bfloat16, **options):
    """Names of what a second call starts, forward and backward, and how often it waits."""
    with triton_there() as there:
        tokens, options = make(length, "meta", dtype, **options)
        first = [token[:, :, :1] for token in tokens]  # draws the directions, which are kept
        favor.favor_attention(*first, num_features=32, **{**options, "key_padding_mask": None})
        there.launches.clear()
        there.reads = 0
        out = favor.favor_attention(*tokens, num_features=32, **options)
        forward = list(there.launches)
        torch.autograd.grad(out, tokens, torch.ones_like(out))
        backward = there.launches[len(forward) + 1 :]  # the first one made the gradient
    return forward, backward, there.reads


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets(name, monkeypatch):
    """Counts, for one of each kind at two lengths, of which one has several pieces, chunks or blocks."""
    set_small_sections(monkeypatch)
    options, most_forward, most_backward = BUDGETS[name]
    lengths = (24, 50) if name in LENGTHS else (24,)
    found = [launches(length, features=name.split(",")[0], **options) for length in lengths]
    assert found[0] == found[-1]
    forward, backward, reads = found[0]
    assert reads == 0
    assert len(forward) <= most_forward, forward
    assert len(backward) <= most_backward, backward


@pytest.mark.parametrize(("features", "most", "most_of_a_block"), [("landmark", 4, 6), ("pos", 4, 4)])
def test_budgets_of_one_token(features, most, most_of_a_block, monkeypatch):
    """Counts a token within a block of landmarks, and one that begins the next one."""
    set_small_sections(monkeypatch)
    options = {"features": features, "is_causal": True, "num_features": 32}
    options |= {"selected_keys": 6} if features == "landmark" else {}
    with triton_there() as there, torch.no_grad():
        tokens, state, counts = torch.randn(1, 1, 25, 16).to("meta", torch.bfloat16), StreamState(), []
        for first, last in [(0, 21), *((n, n + 1) for n in range(21, 25))]:
            piece = [tokens[:, :, first:last]] * 3
            there.launches.clear()
            favor.favor_attention(*piece, state=state, **options)
            counts.append(list(there.launches))
    assert there.reads == 0
    assert max(map(len, counts[2:4])) <= most, counts[3]
    assert len(counts[4]) <= most_of_a_block, counts[4]


@pytest.mark.parametrize("name", ["gerf, padding", "wderf, calibrated"])
def test_numbers_are_those_of_plain_operations(name):
    options, *_ = BUDGETS[name]
    features = name.split(",")[0]
    form = {"wderf": "cholesky"}.get(features, "auto")

    def run(device, dtype):
        tokens, given = make(30, device, dtype, features, batch=2, heads=(4, 2), **options)
        given["features"] = favor.features.get(features, factorization=form)
        if device == "cpu" and "parameters" in given:
            given["parameters"] = given["parameters"].to(tokens[0])
        out = favor.favor_attention(*tokens, num_features=32, **given)
        return [out, *torch.autograd.grad(out.square().sum(), tokens)]

    with triton_there():
        found = [tensor.held for tensor in run("meta", torch.float32)]
    for one, other in zip(found, run("cpu", torch.float64), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


if __name__ == "__main__":  # a row of a table for each case: launches forward and backward; -v names them
    for name, (options, *_) in BUDGETS.items():
        forward, backward, reads = launches(50, features=name.split(",")[0], **options)
        print(
            f"| {name} | {len(forward)} | {len(backward)} |", *((forward, backward, reads) if "-v" in sys.argv else ())
        )
