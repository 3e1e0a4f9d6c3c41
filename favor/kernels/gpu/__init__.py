"""Triton kernels; imported when the first of them runs, since triton need not be installed."""
