"""Adds a family that is not favor's own to the table of families that the tests of attention run through."""

import pytest
from own_family import OppositePairs, registered


@pytest.fixture(autouse=True, scope="module")
def _own_family():
    with registered(OppositePairs):
        yield
