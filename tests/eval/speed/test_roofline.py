"""Counts of the roofline are those that PyTorch and the operators make, and those of tensors."""

import json
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import favor
from favor.eval.speed import __main__ as speed
from favor.eval.speed import roofline
from favor.eval.speed.roofline import FEATURES, Shape
from favor.kernels.eager import causal
from favor.kernels.gpu import chunks
from favor.kernels.operands import Geometry, Operands, Result

LENGTH, WIDTH = 2048, 64
ROWS = (1, 1, LENGTH, WIDTH)


def products(method, **options):
    return method(Shape(LENGTH, WIDTH, **options))["products"]


def operands(device="meta"):
    """Of one head, in the type that is counted."""
    rows = [torch.zeros(ROWS, device=device, dtype=torch.bfloat16) for _ in range(3)]
    directions = [torch.zeros(1, 1, FEATURES, WIDTH, device=device) for _ in range(2)]
    others = torch.zeros(1, 1, FEATURES, device=device), torch.zeros(1, 1, LENGTH, device=device)
    return Operands(*rows, *directions, *others)


def test_exact_attention():
    forward = sdpa_flop_count(ROWS, ROWS, ROWS)
    assert 2 * products(roofline.softmax, is_causal=False, backward=False) == forward
    both = forward + sdpa_backward_flop_count(ROWS, ROWS, ROWS, ROWS)
    assert 2 * products(roofline.softmax, is_causal=False, backward=True) == both


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("features", ["pos", "landmark"])
def test_operators(features, is_causal, backward):
    """The operators count no savings of causality: of a section and of a search they count twice as much."""
    tensors = [torch.empty(ROWS, device="meta", requires_grad=backward) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        out = favor.favor_attention(*tensors, is_causal=is_causal, features=features, num_features=FEATURES)
        out.sum().backward() if backward else None
    counted = {str(name): number for name, number in counter.get_flop_counts()["Global"].items()}
    counted = sum(number for name, number in counted.items() if name.startswith("favor."))
    methods = roofline.DECODERS if is_causal else roofline.ENCODERS
    name = "landmark" if features == "landmark" else "favor+, favor#" if is_causal else "favor+"
    own = 2 * products(methods[name], is_causal=is_causal, backward=backward)
    once = 2 * LENGTH * WIDTH
    if features == "pos" and is_causal:  # pairs in a chunk, and logits that are computed again
        chunk = roofline.chunk_of(WIDTH)
        own -= once * FEATURES * (1 + 7 * backward)
        own -= 2 * LENGTH * chunk * (FEATURES + WIDTH) * (1 + 3 * backward)
    elif features == "pos":
        own -= once * FEATURES * backward  # logits of the queries, which two kernels compute
    elif is_causal:
        own += once * 128 * (7 if backward else 2)
        own += once * (LENGTH - 1) // 2 * (1 / 4 + 1 / 64)
    else:  # plain torch sorts and chooses
        own -= 2 * 2 * roofline.ranked(LENGTH, WIDTH)["products"]
        own -= 2 * roofline.chosen_nodes(LENGTH, WIDTH, 16)["products"]
    assert own == counted


def test_causal_features_are_counted_as_in_plain_torch():
    given = Operands(*(tensor.float() for tensor in operands("cpu")[:7]))
    run = partial(causal.forward, given, Geometry(None, None, LENGTH, LENGTH, True), roofline.chunk_of(WIDTH))
    with FlopCounterMode(display=False) as counter:
        run()
    own = products(roofline.DECODERS["favor+, favor#"], is_causal=True, backward=False)
    # All but the three products of logits, which are written into a buffer; and a column for the normaliser.
    assert counter.get_total_flops() == 2 * (own - 3 * LENGTH * FEATURES * WIDTH + LENGTH * FEATURES)


def test_bytes_are_those_of_tensors():
    given = operands()
    query, key, value, bias = (*given[:3], given.key_bias)
    geometry = Geometry(None, None, LENGTH, LENGTH)
    result = Result.empty("bidirectional", given, geometry, keeps_lse=True)
    own = roofline.softmax(Shape(LENGTH, WIDTH, False, False))["memory"]
    assert own == sum(tensor.nbytes for tensor in (query, key, value, result.out, result.lse))
    # The bias is made of the keys; parts of the sums, the sums and their rounded form are written, or read, once.
    own = roofline.ENCODERS["favor+"](Shape(LENGTH, WIDTH, False, False))["memory"]
    moved = (key, bias, key, value, bias, query, result.out, result.lse)
    assert own == sum(tensor.nbytes for tensor in moved) + 4 * result.summary.nbytes


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
def test_chunks(width):
    tokens = torch.empty(1, 1, LENGTH, width, device="meta", dtype=torch.bfloat16)
    given = Operands(tokens, tokens, tokens, *operands()[3:7])
    assert chunks.Problem.of(given, Geometry(None, None, LENGTH, LENGTH, True)).chunk == roofline.chunk_of(width)


def test_crossover_and_page(ran):
    """Exact attention that takes twice as long is beaten earlier; the page has all methods."""
    for named, is_causal in ((roofline.ENCODERS, False), (roofline.DECODERS, True)):
        shape, limits = Shape(1, WIDTH, is_causal, False), roofline.CARDS["H200"]
        for method in named.values():
            times = (partial(roofline.exact, card="H200", measured=known) for known in ({shape: 2.0}, {}))
            early, late = (roofline.crossover(method, shape, time, limits) for time in times)
            assert late is None if method is roofline.softmax else early <= late
    _, text = ran(roofline, "--lengths", 1024, 4096, code=0)
    assert all(name in text for name in (*roofline.ENCODERS, *roofline.DECODERS))


@pytest.mark.parametrize("older", [False, True])
def test_measured_times_are_read_from_results_of_the_benchmark(older, ran, tmp_path):
    """And of the pages here, whose names of options are older."""
    words = ["--device", "cpu", "--per_device_eval_batch_size", "4"]
    content = speed.context(speed.parse_arguments(words), words) | {"machine": "NVIDIA H200"}
    if older:
        content["settings"] = {"batch_size": 4, "heads": speed.HEADS, "head_dim": speed.HEAD_DIM}
    least = roofline.seconds(roofline.softmax(Shape(LENGTH, 64, True, False)), roofline.CARDS["H200"], 4 * speed.HEADS)
    cell = {"panel": "causal, forward", "method": "sdpa:flash", "length": LENGTH, "timing": {"median": 3 * least[0]}}
    (tmp_path / "speed.json").write_text(json.dumps(content | {"cells": [cell]}))
    found = roofline.slowdowns([tmp_path / "speed.json"], "H200")
    assert found == {Shape(LENGTH, 64, True, False): pytest.approx(3)}
    assert roofline.slowdowns([tmp_path / "speed.json"], "H100") == {}
    ran(roofline, "--lengths", 1024, "--measured", tmp_path / "speed.json", code=0)
