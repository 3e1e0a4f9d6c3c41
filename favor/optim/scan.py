"""Prefix scans of linear recurrences along the last dimension: O(n) work in O(log n) vectorised steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Elements = tuple[Tensor, ...]


def prefix_scan(combine: Callable[[Elements, Elements], Elements], elements: Elements) -> Elements:
    """Computes all prefixes of an associative product along the last dimension.

    Neighbours are combined in pairs, the pairs scanned by recursion, and the even places filled in from the odd ones.

    Args:
        combine: (earlier, later) -> their product, element by element along the last dimension.
        elements: tensors `[..., n]` with n >= 1, which together make one element at each place.

    Returns:
        Tensors `[..., n]`: at place k the product of elements 0 to k.
    """
    n = elements[0].shape[-1]
    if n == 1:
        return elements
    whole = n - n % 2
    odd = prefix_scan(
        combine,
        combine(tuple(e[..., 0:whole:2] for e in elements), tuple(e[..., 1:whole:2] for e in elements)),
    )
    results = tuple(torch.empty_like(e) for e in elements)
    for result, element, at_odd in zip(results, elements, odd, strict=True):
        result[..., 0] = element[..., 0]
        result[..., 1::2] = at_odd
    if n > 2:
        before = tuple(e[..., : (n - 1) // 2] for e in odd)
        for result, even in zip(results, combine(before, tuple(e[..., 2::2] for e in elements)), strict=True):
            result[..., 2::2] = even
    return results


def affine_scan(factor: Tensor, term: Tensor, *, reverse: bool = False, exclusive: bool = False) -> Tensor:
    """Runs the recurrence h_k = factor_k h_{k-1} + term_k with h before the first place 0.

    Args:
        factor: `[..., n]`.
        term: `[..., n]`, broadcasts with `factor`.
        reverse: run from the last place to the first, h_k = factor_k h_{k+1} + term_k.
        exclusive: give at every place the h of the place before, and 0 at the first.

    Returns:
        h `[..., n]`.
    """
    factor, term = torch.broadcast_tensors(factor, term)
    if reverse:
        return affine_scan(factor.flip(-1), term.flip(-1), exclusive=exclusive).flip(-1)

    def combine(earlier: Elements, later: Elements) -> Elements:
        return later[0] * earlier[0], torch.addcmul(later[1], later[0], earlier[1])

    whole = prefix_scan(combine, (factor, term))[1]
    return torch.nn.functional.pad(whole[..., :-1], (1, 0)) if exclusive else whole
