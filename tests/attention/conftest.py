"""The table of families that attention runs through has one that is not the package's own."""

import pytest
from own_family import OppositePairs, registered


@pytest.fixture(autouse=True, scope="module")
def _own_family():
    with registered(OppositePairs):
        yield
