"""A small heap for tests that build many optimizers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hides objects of imports from Python's garbage collector, which optimizers ask for the holders of a weight."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
