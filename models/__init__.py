"""Model zoo: importing this package registers its models with transformers' Auto classes."""

from favor.models import bert, conformer

__all__ = ["bert", "conformer"]
