"""`AttentionCall`: all that a call of `favor_attention` says besides its tensors, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from favor.attention.directions import Draw, compiled_directions, directions, exported_directions, shape_of
from favor.attention.packing import Packing
from favor.config import MOST_FEATURES, MOST_HEADS, MOST_TOKENS
from favor.features import Parameters, RandomFeatures
from favor.kernels import StreamState
from favor.kernels.dispatch import check_not_scripted, has_shape_only, is_exporting
from favor.registry import Family


class CallOptions(TypedDict, total=False):
    """Keyword arguments of `favor.favor_attention` beyond the common ones; its docstring explains them."""

    query_padding_mask: Tensor | None
    layer: int
    redraw: int
    orthogonal: bool
    use_statistics: bool
    parameters: Parameters | None
    correction: Parameters | None
    window: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    state: StreamState | None
    kernel: str
    key_heads: tuple[int, int] | None
    selected_keys: int | None


_COMMON = {"num_features", "is_causal", "seed"}  # explicit in the signature of `favor_attention`


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in the form that every method takes; `favor.favor_attention` explains the rest.

    Attributes:
        num_features: M, of features or landmarks.
        is_causal: query i sees keys 0 ... S - L + i.
        scale: factor of the logits.
        seed, layer, redraw, orthogonal: choose the directions.
        use_statistics: whether parameters may come from the tokens at hand.
        parameters, correction: given parameters, and a change of the parameters.
        window: tokens of a block that is exact, 0 for none.
        state: what earlier tokens left behind; None if there is no state.
        kernel: "auto", "torch" or "triton".
        key_mask: boolean `[B, S]`, True for real keys; None if all are.
        query_mask: boolean `[B, L]`, True for the queries that count in statistics; None if all do.
        packing: lengths of packed sequences, None if nothing is packed.
        key_heads: for a process that has only some key heads: the number of its first one, and how many the model has.
        selected_keys: how many keys a block of queries attends to exactly, 0 for none.
    """

    num_features: int
    is_causal: bool
    scale: float
    seed: int
    layer: int = 0
    redraw: int = 0
    orthogonal: bool = True
    use_statistics: bool = True
    parameters: Parameters | None = None
    correction: Parameters | None = None
    window: int = 0
    state: StreamState | None = None
    kernel: str = "auto"
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    packing: Packing | None = None
    key_heads: tuple[int, int] | None = None
    selected_keys: int = 0

    @classmethod
    def of(
        cls,
        family: Family,
        tensors: tuple[Tensor, Tensor, Tensor],
        *,
        scale: float | None,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None = None,
        **options: Any,
    ) -> AttentionCall:
        """Checks a call and bundles it; nothing of the caller is changed.

        Args:
            family: what computes the attention.
            tensors: query `[B, H, L, d]`, key `[B, Hk, S, d]`, value `[B, Hk, S, dv]`.
            scale: None for 1/sqrt(d).
            key_padding_mask, query_padding_mask: the two masks.
            **options: the other arguments of `favor.favor_attention`.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.
        """
        query, key, _ = tensors
        check_not_scripted()
        _check_whole(query)
        _check_tensors(*tensors)
        if scale is not None and not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}.")
        unknown = sorted(options.keys() - CallOptions.__annotations__.keys() - _COMMON)
        if unknown:
            known = ", ".join(sorted(CallOptions.__annotations__))
            raise TypeError(f"favor_attention got an unknown argument {', '.join(unknown)}; its options are {known}.")
        if options.get("selected_keys") is None:
            options["selected_keys"] = family.default_selected[bool(options.get("is_causal"))]
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        lengths = [options.pop(name, None) for name in names]
        call = cls(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            key_mask=key_padding_mask,
            query_mask=query_padding_mask,
            **options,
        )
        call._check_key_heads(key.shape[1])
        call._check_masks(query, key)
        if lengths[0] is not None or lengths[1] is not None:
            call = replace(call, packing=Packing.of(query, key, call.is_causal, *lengths))
            if not (key_padding_mask is None and query_padding_mask is None):
                raise ValueError("a packed batch has no padding: pass either masks or cu_seqlens, not both.")
        call._check_family(family, query, key)
        return call

    def directions(self, family: RandomFeatures, key: Tensor, root: float = 1.0) -> Tensor:
        """Draws omega times `root`, `[Hk, M, d]`, in the type of the sums."""
        first, heads = self.key_heads or (0, key.shape[1])
        draw = Draw(
            family.draws_like,
            self.num_features,
            key.shape[-1],
            heads,
            self.orthogonal,
            self.seed,
            self.layer,
            self.redraw,
            key.device,
            torch.float64 if key.dtype == torch.float64 else torch.float32,
            root,
        )
        if is_exporting():
            omega = exported_directions(*draw)
        elif isinstance(draw.source, str) and torch.compiler.is_compiling():
            omega = compiled_directions(*draw)
        elif has_shape_only(key):
            omega = key.new_empty(shape_of(draw), dtype=draw.dtype)
        else:
            omega = directions(draw)
        return omega if self.key_heads is None else omega[first : first + key.shape[1]]

    def _check_key_heads(self, number: int) -> None:
        first, heads = self.key_heads or (0, number)
        if first < 0 or first + number > heads or heads > MOST_HEADS:
            raise ValueError(
                f"key_heads must be the number of the first of {number} key heads and how many there are in all, at "
                f"most {MOST_HEADS}; got {self.key_heads}."
            )

    def finite_padding(self, query: Tensor, key_length: int) -> Tensor:
        """Puts 0 in place of NaN and infinity in padded queries `[B, H, L, d]`, whose finite numbers stay.

        Their outputs are not read, but NaN times their gradient, which is 0, is NaN and would reach every key.
        """
        mask = self.query_padding(query.shape[2], key_length)
        return query if mask is None else torch.where(mask[:, None, :, None], query, query.nan_to_num(0.0, 0.0, 0.0))

    def query_padding(self, length: int, key_length: int) -> Tensor | None:
        """Gives the mask of the queries, boolean `[B, L]`, True for real ones; None if nothing says which are padding.

        Queries without a mask of their own are the tokens of the keys: the last ones in causal attention, all of them
        if there are as many queries as keys.

        Args:
            length, key_length: L and S.
        """
        if self.query_mask is not None or self.key_mask is None:
            return self.query_mask
        own = self.is_causal or length == key_length
        return self.key_mask[:, key_length - length :] if own else None

    def _check_masks(self, query: Tensor, key: Tensor) -> None:
        batch, length, key_length = query.shape[0], query.shape[2], key.shape[2]
        if self.is_causal and length > key_length:
            raise ValueError(
                f"causal attention needs at least as many keys as queries, got {length} queries and {key_length} keys."
            )
        masks = (("key_padding_mask", self.key_mask, key_length), ("query_padding_mask", self.query_mask, length))
        for name, mask, size in masks:
            if mask is None:
                continue
            if mask.dtype != torch.bool:
                raise TypeError(f"{name} must be boolean (True for real tokens), got {mask.dtype}.")
            if mask.shape != (batch, size):
                raise ValueError(f"{name} must be [{batch}, {size}], got {tuple(mask.shape)}.")

    def _check_family(self, family: Family, query: Tensor, key: Tensor) -> None:
        """Raises a ValueError for what the family is not able to do."""
        if self.state is not None:
            self._check_state(family, query.shape[2], key.shape[2])
        for name in ("window", "selected_keys"):
            if not 0 <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(f"{name} must be from 0 to {MOST_TOKENS}, got {getattr(self, name)}.")
        if self.num_features > MOST_FEATURES:
            raise ValueError(f"num_features must be at most {MOST_FEATURES}, got {self.num_features}.")
        if self.window:
            self._check_window(family, query.shape[2], key.shape[2])
        if self.selected_keys and not family.selects_keys:
            raise ValueError(f"{family.name} features select no keys; use selected_keys=0.")
        if self.kernel not in ("auto", "torch") and not family.has_kernel:
            raise ValueError(f'{family.name} features have no Triton kernel; use kernel="auto" or "torch".')
        if not family.takes_parameters and not (self.parameters is None and self.correction is None):
            raise ValueError(f"{family.name} features have no parameters that could be given or corrected.")

    def _check_state(self, family: Family, length: int, key_length: int) -> None:
        if not family.supports_state:
            raise ValueError(
                f"a state needs positive features or landmarks, got {family!r}; use pos, gerf, wderf or landmark."
            )
        if not self.is_causal or self.packing is not None or length != key_length:
            raise ValueError(
                "a state is for causal self-attention without packing: is_causal=True, as many keys as queries, no "
                f"cu_seqlens; got is_causal={self.is_causal}, {length} queries and {key_length} keys"
                f"{', and lengths' if self.packing is not None else ''}."
            )

    def _check_window(self, family: Family, length: int, key_length: int) -> None:
        if not family.supports_window or getattr(family, "alpha", 0) != 0:
            raise ValueError(
                "a window needs positive features of the softmax kernel (alpha = 0), which share a normaliser with "
                f"exact weights; got {family!r}. Use window=0."
                + (
                    " Landmarks read the keys that matter, near or far: raise selected_keys."
                    if family.selects_keys
                    else ""
                )
            )
        if not self.is_causal and length != key_length:
            raise ValueError(
                f"a window needs queries and keys of the same tokens, got {length} queries and {key_length} "
                "keys; use window=0 for cross attention."
            )
        packing = self.packing
        if packing is None or self.is_causal or packing.queries is packing.keys:
            return
        if not torch.equal(packing.queries, packing.keys):
            raise ValueError(
                "a window needs packed queries and keys of the same lengths; use window=0 for cross attention."
            )


def _check_whole(query: Tensor) -> None:
    """Raises a ValueError if this process may have only a part of each sequence, which no later check could notice."""
    if type(query).__name__ == "DTensor":
        raise ValueError(
            "attention needs ordinary tensors with whole sequences, got a DTensor. Give each process all tokens of its "
            "heads (Shard(1) or Replicate()) and pass tensor.to_local()."
        )
    # torch's context_parallel replaces this function for as long as it is active.
    fused = torch.nn.functional.scaled_dot_product_attention
    if str(getattr(fused, "__module__", "")).startswith("torch.distributed."):
        raise ValueError(
            "favor attention was called inside torch's context_parallel, where each process has a part of each "
            "sequence and would attend to that part alone. Leave context parallelism out (cp_size=1), or use "
            'attn_implementation="sdpa".'
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}.")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], got shape {tuple(tensor.shape)}.")
    batch, heads, _, head_dim = query.shape
    if key.shape[0] != batch or key.shape[-1] != head_dim:
        raise ValueError(
            f"key must have the batch size {batch} and width {head_dim} of query, got shape {tuple(key.shape)}."
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must agree with key in batch, heads and length {tuple(key.shape[:3])}, "
            f"got {tuple(value.shape[:3])}."
        )
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"query heads must be a multiple of the key heads, got {heads} and {key.shape[1]}.")
