"""Attention in plain torch that is exact inside blocks of tokens and linear between them."""
