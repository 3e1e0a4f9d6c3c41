"""Kernels in plain torch, a block of tokens at a time; for any device."""
