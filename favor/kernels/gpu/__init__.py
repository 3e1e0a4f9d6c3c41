"""Triton kernels; imported when the first of them runs, since triton need not be installed.

They take operands as `favor.kernels.operands.Operands.readable` gives them, float32 but for the tokens.
"""
