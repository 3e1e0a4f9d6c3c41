"""A family that is not favor's own in the table of families, and small sections in causal landmarks."""

import pytest
from own_family import OppositePairs, registered
from small_sections import set_small_sections


@pytest.fixture(autouse=True)
def _own_family_and_small_sections(monkeypatch):
    set_small_sections(monkeypatch)
    with registered(OppositePairs):
        yield
