"""A family that is not favor's own in the table of families, and small sections in causal landmarks."""

import pytest
from own_family import OppositePairs, registered
from small_sections import set_small_sections


@pytest.fixture(autouse=True, scope="module")
def _own_family():
    with registered(OppositePairs):
        yield


@pytest.fixture(autouse=True)
def _small_sections(monkeypatch):
    set_small_sections(monkeypatch)
