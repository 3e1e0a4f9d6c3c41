"""Attention in Triton that is exact inside blocks of tokens and linear between them."""
