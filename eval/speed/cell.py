"""One cell of the benchmark: its inputs, and the pass over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Cell:
    """All values that determine the inputs of one cell, so that another process can make equal inputs."""

    length: int
    causal: bool
    backward: bool
    batch_size: int = 1
    heads: int = 8
    key_heads: int = 8
    head_dim: int = 64
    num_features: int = 256
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    @property
    def direction(self) -> str:
        """The direction in words: causal or bidirectional."""
        return "causal" if self.causal else "bidirectional"

    @property
    def pass_name(self) -> str:
        """The pass in words: forward or forward+backward."""
        return "forward+backward" if self.backward else "forward"

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return getattr(torch, self.dtype).itemsize

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draws normal query and output gradient `[B, H, L, d]`, key and value `[B, Hk, L, d]`.

        The standard deviation is 1.

        Returns:
            Query, key, value, output gradient; the first three require gradients if the cell has a backward pass.
        """
        generator = torch.Generator(device=self.device).manual_seed(self.seed)

        def draw(heads: int, grad: bool) -> Tensor:
            shape = (self.batch_size, heads, self.length, self.head_dim)
            numbers = torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, self.dtype))
            return numbers.requires_grad_(grad and self.backward)

        query, key = draw(self.heads, True), draw(self.key_heads, True)
        return query, key, draw(self.key_heads, True), draw(self.heads, False)

    @property
    def input_output_bytes(self) -> int:
        """Bytes that any method must move: q, k, v and the output; with a backward pass also their gradients."""
        once = 2 * self.batch_size * (self.heads + self.key_heads) * self.length * self.head_dim * self.itemsize
        return once * (2 if self.backward else 1)


def run_pass(attend: Attend, query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    """Runs one pass of a cell; gives the output, and the three gradients if the inputs require them.

    Args:
        attend: the attention.
        query: `[B, H, L, d]`.
        key: `[B, Hk, L, d]`.
        value: `[B, Hk, L, d]`.
        slope: gradient of the output, `[B, H, L, d]`.
    """
    if not query.requires_grad:
        with torch.no_grad():
            return (attend(query, key, value),)
    out = attend(query, key, value)
    return (out, *torch.autograd.grad(out, (query, key, value), slope))
