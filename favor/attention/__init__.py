"""Attention in linear time: bidirectional, causal and cross attention by any family."""

from favor.attention import far_features, linear, signed  # noqa: F401  each adds its method
from favor.attention.functional import favor_attention

__all__ = ["favor_attention"]
