"""Causal attention in Triton, a chunk of tokens at a time."""
