"""A small heap for tests that build many optimizers."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """Hides objects of imports from Python's garbage collector, which optimizers ask for the holders of a weight."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
