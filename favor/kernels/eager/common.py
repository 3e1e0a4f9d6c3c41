"""Tools of the kernels in plain torch: memory, safe exponentials, a sequence as the loops read it, fused softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from favor.kernels.operands import Sequence

# Numbers in one block of features: it should stay in cache, and be small compared with the tensors it is made from; but
# each block costs about twenty calls, however small it is.
SMALLEST_BLOCK, _LARGEST_BLOCK = 2**19, 2**20

LOG2E, LN2 = 1 / math.log(2), math.log(2)


class Buffer:
    """Memory for one product, used again for the next; fresh pages each time cost more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def empty(self, *shape: int) -> Tensor:
        """Gives uninitialised memory of a shape; valid until the next call of any method."""
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(0)  # freed before there is more
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)

    def product(self, rows: Tensor, columns: Tensor, factor: float = 1.0) -> Tensor:
        """Multiplies rows `[N, R, w]`, columns `[N, w, C]` and a factor."""
        out = self.empty(rows.shape[0], rows.shape[1], columns.shape[2])
        return torch.baddbmm(out, rows, columns, beta=0.0, alpha=factor, out=out)

    def rows(self, table: Tensor, places: Tensor) -> Tensor:
        """Gives the rows of a table `[n, w]`, `[places, w]`."""
        return torch.index_select(table, 0, places, out=self.empty(len(places), table.shape[1]))


def exp2(logits: Tensor, most: float = 0.0) -> Tensor:
    """Computes 2^logits in place, for `logits` relative to a term of the same sum.

    On a CPU, natural exponents below the normal numbers take up to 200 times as long (exp of MKL), and products with
    subnormal numbers 100 times. So this is base 2, and numbers too small to count are 0. Logits are cut at `most`, 0 if
    they are relative to the largest term or to the whole sum: if two ways to one very large logarithm round it
    differently, their difference would overflow.
    """
    return vanish(logits.clamp_(max=most).exp2_())


def vanish(weights: Tensor) -> Tensor:
    """Puts 0, in place, where a weight is below 2^-100 (float32) or 2^-996 (float64)."""
    return torch.threshold_(weights, 2.0**26 * torch.finfo(weights.dtype).tiny, 0.0)


@dataclass
class Inputs:
    """A sequence as the loops need it: batch and key heads are one dimension N, and logarithms are in base 2.

    Attributes:
        sequence: where the tensors come from.
        query, key, value: as they were given.
        query_directions, key_directions: `[N, M, d]`; offset: `[N, 1, M]`; key_bias: `[N, S, 1]`.
        hidden: `[N, S, 1]`, True for keys with a bias of -inf; None if there are none.
    """

    sequence: Sequence
    query: Tensor
    key: Tensor
    value: Tensor
    query_directions: Tensor
    key_directions: Tensor
    offset: Tensor
    key_bias: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, sequence: Sequence) -> Inputs:
        """Prepares a sequence or batch; reads the bias once, to see whether any key is hidden."""
        operands = sequence.operands
        batch, key_heads = operands.key.shape[:2]

        def per_head(tensor: Tensor) -> Tensor:
            return tensor.expand(batch, *tensor.shape[1:]).flatten(0, 1)

        query_directions, key_directions, offset = map(per_head, operands[3:6])
        bias = operands.key_bias.reshape(batch * key_heads, -1, 1) * LOG2E
        hidden = bias == -torch.inf
        some = hidden if bool(hidden.any()) else None
        directions = (query_directions, key_directions, offset.unsqueeze(1) * LOG2E)
        return cls(sequence, *operands[:3], *directions, bias, some)

    @property
    def heads(self) -> int:
        """N, batch times key heads."""
        return self.key_directions.shape[0]

    @property
    def groups(self) -> int:
        """G, query heads per key head."""
        return self.sequence.operands.groups

    @property
    def prefix(self) -> int:
        """Keys before the first query of a causal layer, whose queries are those of the last keys."""
        return self.key.shape[2] - self.query.shape[2]

    def queries(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Gives the rows of a tensor `[B, H, L, w]` as `[N, G (stop - start), w]`, in the type of the directions."""
        rows = tensor[:, :, start:stop].to(self.offset.dtype)
        return rows.reshape(self.heads, -1, tensor.shape[-1])

    def keys(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Gives rows of a tensor `[B, Hk, S, w]` as `[N, stop - start, w]`; hidden ones become zeros."""
        rows = tensor[:, :, start:stop].to(self.offset.dtype).reshape(self.heads, -1, tensor.shape[-1])
        return rows if self.hidden is None else rows.masked_fill(self.hidden[:, start:stop], 0.0)

    def blocks(self, rows: int, length: int, smallest: int = SMALLEST_BLOCK) -> list[tuple[int, int]]:
        """Gives ranges that cover `length` tokens; each token has `rows` rows of features."""
        features, width = self.key_directions.shape[1:]
        budget = min(max(rows * length * width // 8, smallest), _LARGEST_BLOCK)
        size = max(64, budget // (rows * features) // 64 * 64)
        return [(start, min(start + size, length)) for start in range(0, length, size)]


def summarise(inputs: Inputs, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums each feature over the keys before `stop`.

    Returns:
        maximum of the key logits in base 2 `[N, M, 1]` (0 if there is no visible key), sum of 2^(logit - maximum)
        `[N, M, 1]`, and this sum over values `[N, M, dv]`.
    """
    n, features = inputs.key_directions.shape[:2]
    # Finite where nothing is visible yet: 2^(-inf - top) is 0 there.
    top = inputs.key_directions.new_full((n, features, 1), torch.finfo(inputs.key_directions.dtype).min)
    total, buffer = torch.zeros_like(top), Buffer(top)
    state = inputs.key_directions.new_zeros(n, features, inputs.value.shape[-1])
    for start, end in inputs.blocks(n, stop):
        columns = inputs.keys(inputs.key, start, end).transpose(1, 2)
        weights = buffer.product(inputs.key_directions, columns, LOG2E)
        weights.add_(inputs.key_bias[:, start:end].transpose(1, 2))
        risen = torch.maximum(top, weights.amax(2, keepdim=True))
        decay = exp2(top - risen)
        total.mul_(decay).add_(exp2(weights.sub_(risen)).sum(2, keepdim=True))
        state.mul_(decay).baddbmm_(weights, inputs.keys(inputs.value, start, end))
        top = risen
    return top.masked_fill_(total == 0, 0.0), total, state


def write(target: Tensor, start: int, stop: int, rows: Tensor) -> None:
    """Writes rows of a block, `[N, G (stop - start), ...]`, into a tensor `[B, H, L, ...]`."""
    block = target[:, :, start:stop]
    block.copy_(rows.view_as(block))


def fused_takes(query: Tensor, value: Tensor) -> bool:
    """Tells whether `fused_attention` takes such tensors: on a CPU, values as wide as keys."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention `[B, H, L, d]` and the logarithm of its normaliser `[B, H, L]`; there must be a key.

    This is PyTorch's kernel for CPUs, that of `scaled_dot_product_attention`. Where it can run, it replaces the loops
    over blocks in forward passes: its blocks stay in cache, and tiny exponentials cost nothing.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, H, S, d]`, `[B, H, S, d]`, of one type, rows in one piece.
        bias: added to the logits, `[B, H, L, S]`; all dimensions except S may be 1. Both results are 0 for a query
            whose biases are all -inf.
        scale: factor of the products.
        is_causal: query i sees keys 0 ... i.
    """
    mask = None if bias is None else bias.contiguous()  # the kernel is twice as slow with a bias that has gaps
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
