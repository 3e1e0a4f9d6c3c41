"""`favor_attention`: one call for every family, bidirectional, causal, cross and packed, checked once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from favor.attention.directions import Draw, compiled_directions, directions, exported_directions, shape_of
from favor.attention.packing import Cleaned, Compaction, Packing
from favor.config import MOST_FEATURES, MOST_HEADS, MOST_TOKENS
from favor.features import Parameters, RandomFeatures
from favor.kernels import StreamState
from favor.kernels.dispatch import check_not_scripted, fuses, has_shape_only, is_exporting
from favor.registry import Family, get

_METHODS: dict[type[Any], Callable[..., Tensor]] = {}
# Processes that share sequences, of `favor.attention.parallel.sequence_parallel`; the innermost are the last.
SEQUENCE_GROUPS: list[Any] = []
# Those that exchange tokens for heads: a backend then has whole sequences, and some of the heads.
HEAD_GROUPS: list[Any] = []


def sequence_group() -> Any:
    """Gives the group of processes that share sequences: in pieces, or else as heads; None if there is none."""
    return (SEQUENCE_GROUPS or HEAD_GROUPS or [None])[-1]


def method(kind: type[Family]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Makes a function `attend(family, query, key, value, call)` compute attention by a kind of family; a decorator."""

    def add(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        _METHODS[kind] = attend
        return attend

    return add


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
    relative: Any


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in the form that every method takes; `favor.favor_attention` explains its arguments."""

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
    relative: Any = None

    def directions(
        self, family: RandomFeatures, key: Tensor, root: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Draws omega times `root`, `[Hk, M, d]`, in `dtype`; default: in the type of the sums."""
        first, heads = self.key_heads or (0, key.shape[1])
        sizes, choice = (self.num_features, key.shape[-1], heads), (self.seed, self.layer, self.redraw)
        if dtype is None:
            dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
        draw = Draw(family.draws_like, *sizes, self.orthogonal, *choice, key.device, dtype, root)
        if is_exporting():
            omega = exported_directions(*draw)
        elif isinstance(draw.source, str) and torch.compiler.is_compiling():
            omega = compiled_directions(*draw)
        elif has_shape_only(key):
            omega = key.new_empty(shape_of(draw), dtype=draw.dtype)
        else:
            omega = directions(draw)
        return omega if self.key_heads is None else omega[first : first + key.shape[1]]

    def finite_padding(self, query: Tensor, key_length: int) -> Tensor:
        """Puts 0 in place of NaN and infinity in padded queries `[B, H, L, d]`, whose finite numbers stay.

        Their outputs are not read, but NaN times their gradient, which is 0, is NaN and would reach every key.
        """
        mask = self.query_padding(query.shape[2], key_length)
        if mask is None:
            return query
        if fuses(query):
            return Cleaned.apply(query, mask)
        return torch.where(mask[:, None, :, None], query, query.nan_to_num(0.0, 0.0, 0.0))

    def query_padding(self, length: int, key_length: int) -> Tensor | None:
        """Gives the mask of the queries, boolean `[B, L]`, True for real ones; None if nothing says which are padding.

        Queries without a mask of their own are the tokens of the keys: the last ones in causal attention, all of them
        if there are as many queries as keys.
        """
        if self.query_mask is not None or self.key_mask is None:
            return self.query_mask
        if length == key_length:
            return self.key_mask  # itself, so that it is looked at once
        return self.key_mask[:, key_length - length :] if self.is_causal else None


def favor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: str | Family,
    num_features: int = 256,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
    **options: Unpack[CallOptions],
) -> Tensor:
    """Computes attention in linear time, by random features of the softmax kernel or by landmarks.

    Approximates softmax(scale query key') value. Works on x = sqrt(scale) query and y = sqrt(scale) key; features and
    maxima are float32 (float64 for float64 inputs) whatever the inputs are. No epsilon is added anywhere. A query
    that sees no key gives zeros, with zero gradient. Positive features are computed for one block of tokens at a time,
    forward and backward, so memory is linear in the length and does not grow with the number of features. With a window
    each block keeps M means of values, so memory grows like 1 + M / window.

    All positive families except PosRF take their parameters, per sequence and key head and without gradient, from the
    moments of the tokens that are not padding, unless `parameters` are given. Moments of a whole sequence would show a
    causal query its future (a change of the second half of a sequence moves the first half's output by about a
    quarter), so with `is_causal` or `use_statistics=False` these families fall back to the parameters that need no
    data, A = 0 and B = I: they then equal PosRF, that is FAVOR+. A warning says so once.

    Landmarks (`features="landmark"`, `favor.landmark.Landmarks`) use nothing random and need no parameters: the keys
    that matter to a block of queries are exact, and means stand for all others.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, Hk, S, d]`; H must be a multiple of Hk (grouped-query attention, keys are not repeated).
        value: `[B, Hk, S, dv]`; dv is free.
        features: a registry name ("pos", "gerf", "sderf", "landmark", ...) or an instance from `favor.features`.
        num_features: number of features M, default 256. More is closer to softmax and slower. Landmarks have M means;
            in causal attention they have one for each 256 keys, and do not read it.
        key_padding_mask: boolean `[B, S]`, True for real keys; None if there is no padding.
        query_padding_mask: boolean `[B, L]`, True for the queries that count in statistics. Defaults to
            `key_padding_mask` where L equals S (self-attention). Causal attention takes no statistics. Other queries
            are padding: NaN and infinity in them count as 0, so that gradients of real tokens are finite.
        is_causal: query i sees keys 0 ... S - L + i (queries are the last ones, as with a cache).
        scale: positive factor of the logits, default 1/sqrt(d).
        seed, layer, redraw: choose the random directions; equal numbers give equal directions on every device.
        orthogonal: orthogonal (default) or independent directions.
        use_statistics: False keeps data-dependent parameters out, for layers whose queries must not see each other;
            with landmarks each query then chooses its keys alone. Causal landmarks are not concerned.
        parameters: parameters of positive features to use instead of those fitted here, `[Hk, d, d]` and `[Hk, d]`
            (or with a leading dimension for the sequences), for x and y. They get gradients if they require them. With
            them a causal query sees nothing of later tokens.
        correction: learned change of the parameters, whether given or fitted, see
            `favor.features.Parameters.corrected`.
        window: tokens are cut into blocks of this many, and inside a block attention is exact, under one normaliser
            with the estimate of the rest; 0 (default) estimates everything. Queries and keys must be those of the same
            tokens. Blocks are counted from the first real token, wherever padding is; padding that is not at the end
            costs a copy of the inputs, and then a step with a cache costs the work of all tokens. A window costs 4
            window d operations per token and head, the features 8 M d. A window that covers the sequence gives softmax
            attention.
        cu_seqlens_q, cu_seqlens_k: cumulative lengths `[N + 1]` of N sequences packed one after another along L and S,
            starting with 0 (the same tensor twice for self-attention). B is then 1, there are no masks, and no
            sequence sees another, nor its statistics.
        max_seqlen_q, max_seqlen_k: the longest sequence; counted if absent, which makes a GPU wait.
        state: for causal attention piece by piece: what earlier tokens left (`favor.kernels.StreamState()` before the
            first), changed in place. The inputs are then the next tokens, without their padding. Packing is not
            possible, and only the first piece gets gradients. The size of the state does not depend on the length,
            except with landmarks, which keep all keys and values and read few of them.
        kernel: how attention by positive features or landmarks is computed: "auto" (Triton on CUDA, torch elsewhere),
            "torch" or "triton"; see `favor.kernels`. All other attention has one form, in plain torch, and refuses
            "triton".
        key_heads: for a process that has only some heads of a layer: the number of its first key head, and how many
            the layer has. Its directions are then those of its own heads. None (default) if it has all.
        selected_keys: K, for landmarks: how many keys a block of queries attends to exactly. Default None: 768, or
            1,024 in causal attention, where each query chooses K/16 more for itself. 0 for none. With at least as many
            as there are keys this is softmax attention.
        relative: biases of the logits by the distance of query and key, `favor.attention.Clipped` or
            `favor.attention.Sinusoidal`; None (default) for none. Keys around a query are then exact, as far as the
            biases vary, and landmarks or positive features stand for all others. L and S must be equal, padding at the
            ends, and nothing packed; there is no state. `window` may widen what is exact.

    Returns:
        `[B, H, L, dv]`, in the type of `query`.

    Raises:
        TypeError: if an input is not a floating-point tensor, or a mask not boolean.
        ValueError: if shapes do not fit together, `scale` is not positive, L > S with `is_causal`, `kernel` cannot run
            here, a window is set where none is possible (cross attention, features that do not estimate exp(x.y)), or a
            state is given without causal attention by positive features or landmarks.

    Example:
        >>> import torch, favor
        >>> query, key, value = torch.randn(3, 1, 2, 100, 8)
        >>> out = favor.favor_attention(query, key, value, features="landmark", num_features=16)
        >>> out.shape
        torch.Size([1, 2, 100, 8])

        As many selected keys as there are keys give softmax attention:

        >>> exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> out = favor.favor_attention(query, key, value, features="landmark", selected_keys=100)
        >>> bool((out - exact).abs().max() < 1e-5)
        True
    """
    family = get(features) if isinstance(features, str) else features
    attend = next((attend for kind, attend in _METHODS.items() if isinstance(family, kind)), None)
    if attend is None:
        kind = type(features).__name__
        raise TypeError(f"features must be a name, a RandomFeatures instance or Landmarks, got {kind}.")
    common = {"num_features": num_features, "is_causal": is_causal, "scale": scale, "seed": seed}
    call = _checked(family, (query, key, value), key_padding_mask, {**common, **options})
    if call.state is not None:
        call.state.note(call.key_mask, key.shape[2], will_forget=family.selects_keys)
    if 0 in (*query.shape[:3], value.shape[3]):  # nothing to compute; still a part of the graph
        nothing = 0 * (query.sum() + key.sum() + value.sum())
        return nothing.to(query.dtype).expand(*query.shape[:3], value.shape[3])
    if call.relative is not None:
        from favor.attention.positions import relative_attention

        with _without_autocast(query):
            return relative_attention(family, query, key, value, call)
    given = query.dtype
    promoted = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = query.to(promoted), key.to(promoted), value.to(promoted)
    query = call.finite_padding(query, key.shape[2])
    if SEQUENCE_GROUPS:
        from favor.attention.parallel import parallel_attention

        with _without_autocast(query):
            return parallel_attention(family, query, key, value, call, SEQUENCE_GROUPS[-1]).to(given)
    return whole_attention(attend, family, query, key, value, call).to(given)


def whole_attention(
    attend: Callable[..., Tensor], family: Family, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
) -> Tensor:
    """Computes attention of whole sequences by the method `attend` of a family, wherever their padding is."""
    length, compaction = query.shape[2], None
    if call.key_mask is not None and call.window:  # blocks begin with the first real token, wherever the padding is
        compaction = Compaction.of(call.key_mask)
    if compaction is not None:
        query, key, value = (compaction.move(tensor) for tensor in (query, key, value))
        query_mask = call.query_mask
        if query_mask is not None and query_mask.shape == compaction.order.shape:
            query_mask = query_mask.gather(1, compaction.order)
        call = replace(call, key_mask=compaction.mask, query_mask=query_mask)
    elif family.selects_keys and max(query.shape[2], key.shape[2]) > 1:
        (query, key, value), call, compaction = _moved_apart((query, key, value), call)
    # Autocast would run the projections, and so the exponents, in half precision.
    with _without_autocast(query):
        out = attend(family, query, key, value, call)
    if compaction is not None:
        if call.is_causal:
            # Padding was moved behind tokens that came after it, and would see them.
            out = out.masked_fill(~compaction.mask[:, None, :, None], 0.0)
        out = compaction.back(out, length)
    return out


def _without_autocast(query: Tensor) -> AbstractContextManager[Any]:
    kind = query.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _moved_apart(
    tensors: tuple[Tensor, Tensor, Tensor], call: AttentionCall
) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionCall, Compaction | None]:
    """Moves padding to the end; gives the tensors, the call with their masks, and how queries were moved, if at all."""
    query, key, value = tensors
    queries, keys = call.query_padding(query.shape[2], key.shape[2]), call.key_mask
    compaction = None if queries is None else Compaction.of(queries)
    is_same = call.query_mask is None and query.shape[2] == key.shape[2]  # a GPU waits for each look at a mask
    moved = compaction if is_same else None if keys is None else Compaction.of(keys)
    if moved is not None:
        key, value, keys = moved.move(key), moved.move(value), moved.mask
    if compaction is not None:
        query, queries = compaction.move(query), compaction.mask
    return (query, key, value), replace(call, key_mask=keys, query_mask=queries), compaction


def _checked(
    family: Family, tensors: tuple[Tensor, Tensor, Tensor], key_mask: Tensor | None, options: dict[str, Any]
) -> AttentionCall:
    """Checks a call of `favor_attention` and bundles it; errors name the argument, what was expected and what came."""
    query, key, _ = tensors
    check_not_scripted()
    _check_whole(query)
    _check_tensors(*tensors)
    if HEAD_GROUPS and options.get("key_heads") is None:
        raise ValueError(
            "inside sequence_parallel(heads=True) the attention layers of a model exchange tokens for heads, and "
            "favor_attention does not. Give it whole sequences of some heads, and key_heads, or leave heads=True out."
        )
    scale = options.pop("scale")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}.")
    unknown = sorted(options.keys() - CallOptions.__annotations__.keys() - {"num_features", "is_causal", "seed"})
    if unknown:
        known = ", ".join(sorted(CallOptions.__annotations__))
        raise TypeError(f"favor_attention got an unknown argument {', '.join(unknown)}; its options are {known}.")
    if options.get("selected_keys") is None:
        options["selected_keys"] = family.default_selected[bool(options["is_causal"])]
    query_mask = options.pop("query_padding_mask", None)
    for name, mask, rows in (("key_padding_mask", key_mask, key), ("query_padding_mask", query_mask, query)):
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"{name} must be boolean (True for real tokens), got {mask.dtype}.")
        if mask is not None and mask.shape != (rows.shape[0], rows.shape[2]):
            raise ValueError(f"{name} must be [{rows.shape[0]}, {rows.shape[2]}], got {tuple(mask.shape)}.")
    length, keys = query.shape[2], key.shape[2]
    if options["is_causal"] and length > keys:
        raise ValueError(f"causal attention needs at least as many keys as queries, got {length} and {keys}.")
    lengths = [options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    packing = None
    if lengths[0] is not None or lengths[1] is not None:
        packing = Packing.of(query, key, options["is_causal"], *lengths)
        if not (key_mask is None and query_mask is None):
            raise ValueError("a packed batch has no padding: pass either masks or cu_seqlens, not both.")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = AttentionCall(scale=scale, key_mask=key_mask, query_mask=query_mask, packing=packing, **options)
    _check_family(call, family, query, key)
    return call


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
            "sequence and would attend to that part alone. Leave context parallelism out (cp_size=1) and take "
            'favor.sequence_parallel, or use attn_implementation="sdpa".'
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}.")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], got shape {tuple(tensor.shape)}.")
    batch, heads, _, head_dim = query.shape
    if key.shape[0] != batch or key.shape[-1] != head_dim:
        found = tuple(key.shape)
        raise ValueError(f"key must have the batch size {batch} and width {head_dim} of query, got shape {found}.")
    if value.shape[:3] != key.shape[:3]:
        expected, found = tuple(key.shape[:3]), tuple(value.shape[:3])
        raise ValueError(f"value must agree with key in batch, heads and length {expected}, got {found}.")
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"query heads must be a multiple of the key heads, got {heads} and {key.shape[1]}.")


def _check_family(call: AttentionCall, family: Family, query: Tensor, key: Tensor) -> None:
    """Raises a ValueError for sizes that are typing mistakes, and for what the family is not able to do."""
    number, lengths = key.shape[1], (query.shape[2], key.shape[2])
    first, heads = call.key_heads or (0, number)
    if first < 0 or first + number > heads or heads > MOST_HEADS:
        raise ValueError(
            f"key_heads must be the number of the first of {number} key heads and how many there are in all, at "
            f"most {MOST_HEADS}; got {call.key_heads}."
        )
    for name in ("window", "selected_keys"):
        if not 0 <= getattr(call, name) <= MOST_TOKENS:
            raise ValueError(f"{name} must be from 0 to {MOST_TOKENS}, got {getattr(call, name)}.")
    if call.num_features > MOST_FEATURES:
        raise ValueError(f"num_features must be at most {MOST_FEATURES}, got {call.num_features}.")
    if call.state is not None and not family.supports_state:
        raise ValueError(f"a state needs positive features or landmarks, got {family!r}; use pos, wderf or landmark.")
    if call.state is not None and (not call.is_causal or call.packing is not None or lengths[0] != lengths[1]):
        packed = ", and lengths" if call.packing is not None else ""
        raise ValueError(
            "a state is for causal self-attention without packing: is_causal=True, as many keys as queries, no "
            f"cu_seqlens; got is_causal={call.is_causal}, {lengths[0]} queries and {lengths[1]} keys{packed}."
        )
    if call.window:
        _check_window(call, family, lengths)
    if call.selected_keys and not family.selects_keys:
        raise ValueError(f"{family.name} features select no keys; use selected_keys=0.")
    if call.kernel not in ("auto", "torch") and not family.has_kernel:
        raise ValueError(f'{family.name} features have no Triton kernel; use kernel="auto" or "torch".')
    if not family.takes_parameters and not (call.parameters is None and call.correction is None):
        raise ValueError(f"{family.name} features have no parameters that could be given or corrected.")


def _check_window(call: AttentionCall, family: Family, lengths: tuple[int, int]) -> None:
    if not family.supports_window or getattr(family, "alpha", 0) != 0:
        instead = " Landmarks read the keys that matter, near or far: raise selected_keys."
        raise ValueError(
            "a window needs positive features of the softmax kernel (alpha = 0), which share a normaliser with "
            f"exact weights; got {family!r}. Use window=0.{instead if family.selects_keys else ''}"
        )
    if not call.is_causal and lengths[0] != lengths[1]:
        counts = f"{lengths[0]} queries and {lengths[1]} keys"
        raise ValueError(f"a window needs queries and keys of the same tokens, got {counts}; use window=0 for others.")
    packing = None if call.is_causal else call.packing
    if packing is None or packing.queries is packing.keys:  # a GPU waits for a look at them
        return
    if not torch.equal(packing.queries, packing.keys):
        raise ValueError("a window needs packed queries and keys of the same lengths; set window=0 for others.")
