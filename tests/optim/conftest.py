"""Parts that the tests of optimizers share."""

from heap import few_objects

__all__ = ["few_objects"]
