"""What attention needs of a GPU by arithmetic, and the length from which each method can beat exact attention.

    python -m favor.eval.speed.roofline --measured eval/results/speed/speed_gpu_*.json

Nothing is run. Counts are those of the kernels in bfloat16, with as many heads of keys as of queries. A time is that of
the resource which takes longest, as if all others waited for nothing, so real times are longer. Not counted: launches,
decompositions of small matrices, the order of the centres of landmarks, and the bytes of short lists.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.speed.report import is_baseline
from favor.train.common.program import Parser, program

NAME = "favor.eval.speed.roofline"
# A second of a card. Memory: data sheets of NVIDIA (H100 SXM and H200). Products (multiply-adds in bfloat16, dense):
# half of 989 TFLOP/s, from the same. Exponentials and float32 instructions: 16 and 128 a clock on each multiprocessor
# (CUDA C++ programming guide, "Throughput of native arithmetic instructions", 9.0), 132 of them at 1.83 GHz, at which
# they make 989 TFLOP/s. Cache (L2): 5,120 bytes a clock, which NVIDIA says of the A100 and not of these two.
CLOCKS = 1.83e9
CHIP = {"cache": 5120 * CLOCKS, "products": 989e12 / 2}
CHIP |= {"exponentials": 16 * 132 * CLOCKS, "float32": 128 * 132 * CLOCKS}
CARDS = {"H100": {"memory": 3.35e12, **CHIP}, "H200": {"memory": 4.8e12, **CHIP}}
BYTES = 2  # of a number
PRECISE = 6  # products of float32: three in tf32, which run at half the speed of bfloat16
FEATURES = 256  # or means
SHORTEST, LONGEST = 2**10, 2**20  # of a search for a crossover: a shorter pass is all launches
TITLE = "Tokens from which on a method can be faster than exact attention"
SHOWN = (1024, 16384, 131072)  # lengths whose counts are shown


class Shape(NamedTuple):
    """One head, and what is computed of it."""

    length: int
    width: int
    is_causal: bool
    backward: bool  # the backward pass too


Needs = Counter[str]  # of each resource
Method = Callable[[Shape], Needs]


def softmax(shape: Shape) -> Needs:
    """Counts exact attention, which forms no matrix of weights in memory and computes them again backwards."""
    length, width, is_causal, backward = shape
    pairs = length * (length + 1) // 2 if is_causal else length * length
    row = width * BYTES  # query, key, value and output; backwards also the gradients, log normalisers and delta
    needs = Counter(products=2 * pairs * width, exponentials=pairs, memory=length * (4 * row + 4))
    if backward:
        needs += Counter(products=5 * pairs * width, exponentials=pairs, memory=length * (8 * row + 12))
    return needs


def chunk_of(width: int) -> int:
    """Gives the tokens of a chunk of the causal kernels."""
    return max(16, min(128, 2**14 // (width * BYTES)))


def features(shape: Shape, has_statistics: bool) -> Needs:
    """Counts attention by positive random features; statistics of a sequence are for encoders only."""
    length, width, is_causal, backward = shape
    row, square, table = width * BYTES, PRECISE * width * width * length, FEATURES * width
    if not is_causal:
        # Biases read the keys; they are summed up; queries read the sums, which are joined in float32 and rounded.
        needs = Counter(products=4 * table * length, exponentials=2 * FEATURES * length)
        needs += Counter(memory=length * (5 * row + 12) + 16 * table)
        if backward:
            # Gradients of queries; the sums of what they send, with their logits again; gradients of keys; of biases.
            needs += Counter(products=9 * table * length, exponentials=3 * FEATURES * length)
            needs += Counter(memory=length * (15 * row + 28) + 16 * table)
        if has_statistics:  # moments of queries and keys, and the form of the bias, whose gradient is another one
            needs += Counter(products=(3 + backward) * square, memory=2 * length * row)
        return needs
    chunk = chunk_of(width)
    states = -(-length // chunk) * (2 * table * BYTES + 16 * FEATURES)  # written and read, with weights and anchors
    inside = length * chunk
    needs = Counter(products=5 * table * length + inside * (FEATURES + width), exponentials=3 * FEATURES * length)
    needs += Counter(memory=length * (7 * row + 16) + states)
    if backward:  # states of the keys again, and of the queries
        needs += Counter(products=15 * table * length + 3 * inside * (FEATURES + width))
        needs += Counter(exponentials=7 * FEATURES * length, memory=length * (21 * row + 48) + 2 * states)
    return needs


def ranked(rows: int, width: int) -> Needs:
    """Counts the order of rows by the nearest of 256 centres, which 64 samples compare; ranks are counted in tiles."""
    centres, samples, bins, tile = 256, 64, 512, 64
    needs = Counter(products=PRECISE * centres * width * (rows + 2 * samples), float32=(3 * centres + 2 * bins) * rows)
    return needs + Counter(memory=rows * (width * BYTES + 12 + 4 * 4 * bins // tile))


def chosen_nodes(length: int, width: int, block: int) -> Needs:
    """Counts the choice of each block: the scores of 256 nodes by mean and variance, and 33 steps to find the best."""
    blocks, scores = -(-length // block), 4 * FEATURES  # bytes
    needs = Counter(products=PRECISE * 2 * FEATURES * width * blocks, float32=2 * 33 * FEATURES * blocks)
    return needs + Counter(memory=2 * scores * blocks + width * BYTES * length, cache=4 * scores * blocks)


def encoder_landmarks(shape: Shape, selected: int) -> Needs:
    """Counts landmarks of an encoder: keys, and with selected keys also queries, are sorted; queries stay in place."""
    length, width, _, backward = shape
    row, selected, block = width * BYTES, min(selected, length), 16 if selected else 64
    columns = min(FEATURES, length) + selected
    needs = attended(length * columns, width, backward) + chosen_nodes(length, width, block)
    for _ in range(2 if selected else 1):
        needs += ranked(length, width)
    # Rows of memory: to move keys and values 4, for the means 2; read query, write output 2; selected keys, values 2.
    needs += Counter(memory=(10 if selected else 8) * row * length, cache=2 * columns * row * length // block)
    if backward:  # read again, and gradients in float32 are added up
        needs += Counter(cache=2 * columns * (row + 4 * width) * length // block)
        # Query, output, its gradient, that of the query 4; sums of float32 zeroed, read 8, put back 2; keys, values 6.
        needs += Counter(memory=(20 if selected else 14) * row * length)
    return needs


def causal_landmarks(shape: Shape, selected: int, block: int = 64, section: int = 256) -> Needs:
    """Counts causal landmarks; each query searches all earlier keys in a quarter of the coordinates."""
    length, width, _, backward = shape
    row, selected = width * BYTES, min(selected, length)
    own, pairs = selected // 16, length * (length + 1) // 2
    near, means = (min(section, length) + 1) // 2, length // section  # near: on average
    needs = attended(length * (selected + own + near + means), width, backward)
    read = length * (own + (selected + 2 * near + means) // block)  # each query its own keys, a block the others
    needs += Counter(cache=2 * read * row)
    # Sums of sections read keys and values 2, and copy a quarter of the keys; attention reads and writes 4.
    needs += Counter(memory=length * (6 * row + row // 4 + 4 + 8 * means // block))
    if selected:  # each pair is multiplied, compared, and two numbers are kept; so are those of a voter for each block
        needs += Counter(products=pairs * width // 4 + pairs * width // block, float32=3 * (pairs + pairs // block))
        # Programs of 64 rows read keys, and those of queries what their block took.
        needs += Counter(cache=pairs * (row // 4 + 4) // block + pairs * row // block // block)
        # Votes, keys, queries, a quarter of the keys; choices are written once, those of blocks read three times.
        needs += Counter(memory=length * (2 * row + row // 4 + row // 16 + 8 * own + 16 * selected // block))
    if backward:  # as in an encoder
        needs += Counter(cache=2 * read * (row + 4 * width))
        needs += Counter(memory=length * (20 * row + 4 * own + 4 * selected // block))
    return needs


def attended(pairs: int, width: int, backward: bool) -> Needs:
    """Counts products and exponentials of softmax attention over some pairs of a query and a key or mean."""
    return Counter(products=(7 if backward else 2) * pairs * width, exponentials=(1 + backward) * pairs)


ENCODERS: dict[str, Method] = {
    "softmax": softmax,
    "favor+": partial(features, has_statistics=False),
    "favor# (wderf)": partial(features, has_statistics=True),
    "landmark, 0 keys": partial(encoder_landmarks, selected=0),
    "landmark": partial(encoder_landmarks, selected=768),
}
DECODERS: dict[str, Method] = {
    "softmax": softmax,
    "favor+, favor#": partial(features, has_statistics=False),
    "landmark, 0 keys": partial(causal_landmarks, selected=0),
    "landmark": partial(causal_landmarks, selected=1024),
}


def seconds(needs: Needs, card: Mapping[str, float], heads: int) -> tuple[float, str]:
    """Gives the least time of some heads on a card, and the resource that takes it."""
    return max((heads * needs[resource] / limit, resource) for resource, limit in card.items())


def crossover(method: Method, shape: Shape, exact: Callable[[Shape], float], card: Mapping[str, float]) -> int | None:
    """Finds the length from which on a method takes less time than exact attention; None for no length."""

    def wins(length: int) -> bool:
        at = shape._replace(length=length)
        return seconds(method(at), card, 1)[0] < exact(at)

    low, high = SHORTEST - 1, LONGEST
    if not wins(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def slowdowns(paths: Sequence[Path], card: str) -> dict[Shape, float]:
    """Reads how many times the limit the fastest exact attention took, from results of favor.eval.speed on a card."""
    found: dict[Shape, float] = {}
    for path in paths:
        content = json.loads(path.read_text())
        settings = content["settings"]
        older = {"batch_size": "per_device_eval_batch_size", "heads": "num_attention_heads"}  # names in older files
        heads = math.prod(settings.get(now, settings.get(before)) for before, now in older.items())
        for cell in content["cells"] if card in content["machine"] else ():
            if cell["timing"] and is_baseline(cell["method"]):
                direction, passes = cell["panel"].split(", ")
                shape = Shape(cell["length"], settings["head_dim"], direction == "causal", passes != "forward")
                share = cell["timing"]["median"] / seconds(softmax(shape), CARDS[card], heads)[0]
                found[shape] = min(share, found.get(shape, math.inf))
    return found


def exact(shape: Shape, card: str, measured: Mapping[Shape, float]) -> float:
    """Gives the time of exact attention for a head: as many times the least as at the nearest measured length."""
    known = [own for own in measured if own[1:] == shape[1:]]
    times = measured[min(known, key=lambda own: abs(math.log(own[0] / shape[0])))] if known else 1.0
    return times * seconds(softmax(shape), CARDS[card], 1)[0]


def crossings(measured: Mapping[str, Mapping[Shape, float]], shape: Shape, method: Method) -> list[str]:
    """Writes the crossovers of a method on all cards: both at their limits, then with exact attention as measured."""
    found = []
    for card, limits in CARDS.items():
        for known in ({}, measured[card]):
            length = crossover(method, shape, partial(exact, card=card, measured=known), limits)
            found.append("none" if length is None else f"{length:,}")
        if all(own[1:] != shape[1:] for own in measured[card]):
            found[-1] = "-"
    return found


def tables(lengths: Sequence[int], heads: int, measured: Mapping[str, Mapping[Shape, float]]) -> list[str]:
    """Writes the page: counts, times and crossovers."""
    panels = [Shape(0, width, causal, both) for width, causal, both in product((64, 128), (False, True), (False, True))]
    resources = list(CARDS["H100"])
    counts, crosses, times = [], [], []
    for panel in panels:
        direction, passes = "causal" if panel.is_causal else "bidirectional", "both" if panel.backward else "forward"
        named, place = DECODERS if panel.is_causal else ENCODERS, f"{direction}, {passes}, {panel.width}"
        rows = []
        for name, method in named.items():
            per_token = []
            for length in SHOWN:
                needs = method(panel._replace(length=length))
                per_token.append("; ".join(f"{round(needs[resource] / length):,}" for resource in resources))
            counts.append([f"{name}, {place}", *per_token])
            if method is not softmax:
                crosses.append([f"{name}, {place}", *crossings(measured, panel, method)])
        for length in lengths:
            row = [f"{length:,}"]
            for method in named.values():
                each = [seconds(method(panel._replace(length=length)), card, heads) for card in CARDS.values()]
                row.append(", ".join(f"{float(f'{1e3 * time:.3g}'):g} {resource[:3]}" for time, resource in each))
            rows.append(row)
        times += ["", f"{place[0].upper()}{place[1:]} wide:", "", *report.table(["tokens", *named], rows)]
    least = f"Least time in ms of {heads} heads on {' and '.join(CARDS)}, with what takes it ({', '.join(resources)})"
    columns = [f"{card}, {kind}" for card in CARDS for kind in ("both at their limits", "exact as measured")]
    return [
        *("# Roofline", "", f"{TITLE}; {SHORTEST:,}: or fewer.", ""),
        *report.table(["", *columns], crosses),
        *("", f"{least}:", *times, ""),
        *(
            f"For each token of a head: {'; '.join(resources)} (bytes, bytes, multiply-adds, numbers, instructions).",
            "",
        ),
        *report.table(["", *(f"{length:,} tokens" for length in SHOWN)], counts),
    ]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments."""
    parser = Parser(NAME, __doc__)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[2**power for power in range(10, 18)], help="numbers of tokens")
    add("--per_device_eval_batch_size", type=int, default=8, help="sequences of a batch, of 8 heads each")
    add("--measured", type=Path, nargs="+", default=[], help="results of favor.eval.speed, for exact attention")
    add_results(parser, "roofline")
    given = parser.parse_args(words)
    if min(*given.lengths, given.per_device_eval_batch_size) < 1:
        parser.error("--lengths and --per_device_eval_batch_size must be at least 1")
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program."""
    arguments = parse_arguments(words)
    measured = {card: slowdowns(arguments.measured, card) for card in CARDS}
    lines = tables(arguments.lengths, 8 * arguments.per_device_eval_batch_size, measured)
    return report.finish(arguments, lines, report.context_of(NAME, words, ()))


cli = program(NAME, main)
if __name__ == "__main__":
    cli()
