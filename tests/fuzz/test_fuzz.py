"""A quick part of the fuzzer: calls that Hypothesis draws and simplifies, the same ones every time."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.small_sections import set_small_sections

from . import attention, generation, invariants
from .__main__ import main
from .attention import Call
from .generation import Generation
from .simplify import simplify

quick = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _small_sections():
    with pytest.MonkeyPatch.context() as patch:
        set_small_sections(patch)
        yield


def drawn(draw: Callable[..., Any]) -> st.SearchStrategy[Any]:
    """What `draw` makes of choices by Hypothesis."""
    return st.composite(lambda pick: draw(lambda values: pick(st.sampled_from(values))))()


@settings(quick, max_examples=300)
@given(drawn(attention.draw))
# More padding at the left than a chunk, and large keys.
@example(Call(length=100, keys=100, padding=("left",), is_causal=True, query_norm=36.0, key_norm=100.0))
# Token by token, with padding between them: hidden queries choose nothing for those after them in their block.
@example(Call("landmark", 80, 80, ("every second",), is_causal=True, dtype="float64", selected=8, pieces=80))
def test_attention(call):
    invariants.check(call)


@settings(quick, max_examples=16)
@given(drawn(generation.draw))
@example(Generation(model="qwen2", lengths=(140, 5), steepness=30.0, pieces=3))
def test_generation(call):
    generation.check(call)


@pytest.mark.parametrize("number", range(45))
def test_steps_with_a_cache(number):
    """Drawn without Hypothesis, which prefers simple runs: few of them choose among keys."""
    generation.check(generation.draw_steps(random.Random(f"steps {number}").choice))


def test_the_simplest_failure_is_found():
    call = Call(features="wderf", length=100, keys=100, padding=("left", "none"), key_norm=300.0, dtype="float64")
    found = simplify(call, lambda call: call.length == call.keys > 6 and call.key_norm > 30)
    assert found == Call(length=7, keys=7, key_norm=found.key_norm)
    assert 30 < found.key_norm <= 60


def test_a_failure_is_printed_as_the_simplest_call_and_counted(monkeypatch, capsys):
    def check(call):
        assert call.features != "wderf" or call.length < 3, f"{call.length} tokens"
        return True

    monkeypatch.setattr(invariants, "check", check)
    monkeypatch.setattr("sys.argv", ["fuzz", "--calls", "100"])
    assert main() == 1
    printed = capsys.readouterr().out
    assert "check(Call(features='wderf', length=3))" in printed
    assert "\n100 calls, 0 refused, " in printed
    monkeypatch.setattr(invariants, "check", lambda call: False)
    assert main() == 0
    assert "100 calls, 100 refused, 0 failed" in capsys.readouterr().out
