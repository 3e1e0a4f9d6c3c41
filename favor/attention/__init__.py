"""Attention in linear time: bidirectional, causal and cross attention by any family."""

from favor.attention import far_features, linear, signed  # noqa: F401  each adds its method
from favor.attention.functional import favor_attention
from favor.attention.positions import Clipped, Sinusoidal

__all__ = ["Clipped", "Sinusoidal", "favor_attention"]
