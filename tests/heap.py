"""A small heap for tests that build many optimizers."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Optimizers ask Python's garbage collector who else holds a weight: not among what imports have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
