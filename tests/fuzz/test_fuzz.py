"""Calls that Hypothesis draws, and of which it prints the simplest one that fails.

They are the same ones every time, unless FUZZ_CALLS says how many to draw at random.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.small_sections import set_small_sections

from . import attention, generation, invariants
from .attention import Call
from .generation import Generation

CALLS = int(os.environ.get("FUZZ_CALLS", 0))
drawing = settings(derandomize=not CALLS, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _small_sections():
    with pytest.MonkeyPatch.context() as patch:
        set_small_sections(patch)
        yield


def drawn(draw: Callable[..., Any]) -> st.SearchStrategy[Any]:
    """What `draw` makes of choices by Hypothesis."""
    return st.composite(lambda pick: draw(lambda values: pick(st.sampled_from(values))))()


@settings(drawing, max_examples=CALLS or 300)
@given(drawn(attention.draw))
# More padding at the left than a chunk, and large keys.
@example(Call(length=100, keys=100, padding=("left",), is_causal=True, query_norm=36.0, key_norm=100.0))
# Token by token, with padding between them: hidden queries choose nothing for those after them in their block.
@example(Call("landmark", 80, 80, ("every second",), is_causal=True, dtype="float64", selected=8, pieces=80))
@example(Call("landmark", 200, 200, dtype="bfloat16", query_norm=1e3, key_norm=1e3, selected=16))
@example(Call("landmark", 200, 200, is_causal=True, query_norm=1e3, key_norm=1e3, selected=16))
def test_attention(call):
    invariants.check(call)


@settings(drawing, max_examples=CALLS or 16)
@given(drawn(generation.draw))
@example(Generation(model="qwen2", lengths=(140, 5), steepness=30.0, pieces=3))
def test_generation(call):
    generation.check(call)


@pytest.mark.parametrize("number", range(CALLS or 45))
def test_steps_with_a_cache(number):
    """Drawn without Hypothesis, which prefers simple runs: few of them choose among keys."""
    generation.check(generation.draw_steps(random.Random(f"steps {number}").choice))
