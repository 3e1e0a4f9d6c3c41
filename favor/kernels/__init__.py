"""How linear attention is computed: blocks of plain torch on any device, Triton kernels on GPUs.

Every kernel takes the same mathematical form (see `linear_attention`), so none knows which random features it runs.
"""

from favor.kernels.dispatch import KERNELS, available
from favor.kernels.ops import linear_attention
from favor.kernels.stream import DecodeState, StreamState, decode, extend

__all__ = ["KERNELS", "DecodeState", "StreamState", "available", "decode", "extend", "linear_attention"]
