"""Model zoo: importing this package registers its models with transformers' Auto classes."""

from favor.models import bert

__all__ = ["bert"]
