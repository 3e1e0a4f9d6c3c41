"""What attention computes: bidirectional, causal and cross attention over random features."""

from favor.attention.functional import favor_attention

__all__ = ["favor_attention"]
