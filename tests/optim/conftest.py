"""What the tests of optimizers share."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """Optimizers ask Python's garbage collector who else holds a weight: not among what imports have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
