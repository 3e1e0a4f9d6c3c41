"""Attention over sequences that are cut into pieces, one for each process.

Every process attends with its queries to its own keys, and exchanges what others need of its keys: of positive features
a weight and a mean value each, whose size does not depend on the length. Landmarks search all keys: processes exchange
their pieces of all heads for whole sequences of some heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from favor.attention.functional import HEAD_GROUPS, SEQUENCE_GROUPS, AttentionCall, whole_attention
from favor.attention.linear import key_bias, moments_of, prepared, query_bias
from favor.features import Moments, PositiveFeatures
from favor.kernels.operands import Operands
from favor.kernels.ops import attention_and_normaliser
from favor.registry import Family

WHOLE = "favor_whole"  # attribute of a mask that all layers share: masks of whole sequences, by group
_ROWS = 4096  # tokens whose features are held at a time
_NOTHING = -1e30  # logarithm of the weight of no keys, finite so that gradients are


@contextmanager
def sequence_parallel(mesh: Any, *, heads: bool = False) -> Iterator[None]:
    """Makes attention take sequences that are cut over processes: inside, each gives its piece and gets its output.

    Pieces are contiguous and equally long, in the order of the ranks; padding is at the end of the last ones. All else
    in a model works on single tokens, but for position ids and losses: see `favor.shard`.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension, or a process group.
        heads: whether the attention layers of a model exchange their pieces of all heads for whole sequences of some
            heads, and back (Ulysses, Jacobs et al., 2023). The number of processes divides the key heads, and
            everything works that works on whole sequences, such as exact layers. Default: positive features exchange
            sums over keys, landmarks exchange heads if the number of processes divides the key heads; in other decoders
            they read the keys and values of all.

    Returns:
        a context manager.

    Example:
        >>> import torch, favor
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> query, key, value = torch.randn(3, 1, 2, 64, 8)
        >>> with favor.sequence_parallel(torch.distributed.group.WORLD):
        ...     out = favor.favor_attention(query, key, value, features="pos", num_features=16)
        >>> whole = favor.favor_attention(query, key, value, features="pos", num_features=16)
        >>> bool((out - whole).abs().max() < 1e-5)
        True
        >>> torch.distributed.destroy_process_group()
    """
    groups = HEAD_GROUPS if heads else SEQUENCE_GROUPS
    groups.append(_group_of(mesh))
    try:
        yield
    finally:
        groups.pop()


def shard(inputs: dict[str, Tensor], mesh: Any, *, is_causal: bool = False) -> dict[str, Tensor]:
    """Takes the piece of this process from the inputs of a model.

    Args:
        inputs: tensors `[B, L, ...]`; each L is a multiple of the number of processes.
        mesh: as in `sequence_parallel`.
        is_causal: whether labels are those of a causal language model. They are then also given as `shift_labels`,
            shifted before the cut, which transformers prefers to labels.

    Returns:
        the pieces `[B, L / n, ...]`, and `position_ids` of the first tensor.

    Raises:
        ValueError: if the length cannot be divided.

    Example:
        >>> import torch, favor
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> favor.shard({"input_ids": torch.zeros(2, 8, dtype=torch.long)}, torch.distributed.group.WORLD).keys()
        dict_keys(['input_ids', 'position_ids'])
        >>> torch.distributed.destroy_process_group()
    """
    group = _group_of(mesh)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    inputs = dict(inputs)
    like = next(iter(inputs.values()))
    inputs.setdefault("position_ids", torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1))
    if is_causal and "labels" in inputs:
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    for length in (tensor.shape[1] for tensor in inputs.values()):
        if length % size:
            raise ValueError(f"{length} tokens cannot be cut into {size} equal pieces; pad to a multiple of {size}.")
    return {name: tensor.chunk(size, 1)[rank].contiguous() for name, tensor in inputs.items()}


def unshard(piece: Tensor, mesh: Any) -> Tensor:
    """Joins pieces of an output, in all processes; the reverse of `shard`.

    Args:
        piece: `[B, L / n, ...]`, of the tokens of this process; equally long in all.
        mesh: as in `sequence_parallel`.

    Returns:
        the whole `[B, L, ...]`. A piece gets the sum of the gradients of all processes: where each of them computes the
        whole loss, average the gradients of weights over the processes.

    Example:
        >>> import torch, favor
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> favor.unshard(torch.zeros(2, 4, 3), torch.distributed.group.WORLD).shape
        torch.Size([2, 4, 3])
        >>> torch.distributed.destroy_process_group()
    """
    return gathered(piece, _group_of(mesh)).movedim(0, 1).flatten(1, 2)


def _group_of(mesh: Any) -> Any:
    return mesh.get_group() if hasattr(mesh, "get_group") else mesh


class _Gathered(torch.autograd.Function):
    """Starts to gather tensors in a new first dimension, which may be read after `wait()` of the second output.

    Gradients are added up where a tensor came from.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> tuple[Tensor, Any]:
        ctx.group = group
        found = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
        return found, dist.all_gather(list(found.unbind(0)), tensor.contiguous(), group=group, async_op=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None]:  # type: ignore[override]
        found = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, grad.contiguous(), group=ctx.group)
        return found.sum(0), None


def gathered(tensor: Tensor, group: Any) -> Tensor:
    """Gives the tensors of all processes, in a new first dimension, with gradients."""
    found, work = _Gathered.apply(tensor, group)
    work.wait()
    return found


class _Exchanged(torch.autograd.Function):
    """Sends the i-th part of a tensor to process i, and gets a part from each; gradients go back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, tensor.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Exchanged.apply(grad, ctx.group), None


def exchanged(tensor: Tensor, group: Any) -> Tensor:
    """Gives `[B, n p, q, d]`, the first part of each of n processes, as `[B, p, n q, d]`, whole in the other."""
    parts = tensor.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)
    found: Tensor = _Exchanged.apply(parts, group)
    return found.movedim(0, 2).flatten(2, 3)


def gathered_mask(mask: Tensor, group: Any) -> Tensor:
    """Gives the mask `[B, L]` of whole sequences, from those of pieces; one of `favor_mask` keeps the answer."""
    known: dict[Any, Tensor] = getattr(mask, WHOLE, {})
    if group not in known:
        known[group] = unshard(mask.to(torch.uint8), group).to(torch.bool)
    return known[group]


def parallel_attention(
    family: Family, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, group: Any
) -> Tensor:
    """Computes the attention `[B, H, n, dv]` of the queries of this process to the keys of all.

    Raises:
        ValueError: for what needs whole sequences.
    """
    has_past = call.state is not None or (call.is_causal and query.shape[2] < key.shape[2])
    if call.packing is not None or has_past or call.relative is not None:
        raise ValueError("sequence_parallel takes no packed sequences, no cache or state and no relative positions.")
    if isinstance(family, PositiveFeatures):
        return _by_features(family, query, key, value, call, group)
    if not family.selects_keys:
        raise ValueError(f"sequence_parallel takes positive features and landmarks, got {family.name}.")
    if key.shape[1] % dist.get_world_size(group) == 0:
        return _by_heads(family, query, key, value, call, group)
    if call.is_causal:
        return _by_keys(query, key, value, call, group)
    raise ValueError(
        f"inside sequence_parallel landmarks of encoders give each process equally many key heads, and there are "
        f"{key.shape[1]} for {dist.get_world_size(group)} processes. Take a number of processes that divides them, or "
        "positive features (favor+, favor++, favor#)."
    )


def _by_heads(family: Family, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, group: Any) -> Tensor:
    from favor.landmark.attention import attend  # which imports this package

    masks = (None if mask is None else gathered_mask(mask, group) for mask in (call.key_mask, call.query_mask))
    call = replace(call, **dict[str, Any](zip(("key_mask", "query_mask"), masks, strict=True)))
    query, key, value = (exchanged(tensor, group) for tensor in (query, key, value))
    out = whole_attention(attend, family, query, key, value, call)
    return exchanged(out.transpose(1, 2), group).transpose(1, 2)


def _check_padding(call: AttentionCall, group: Any) -> None:
    """Raises ValueError for padding that is not at the end, where blocks of tokens begin with each piece."""
    if call.key_mask is None:
        return
    real = gathered_mask(call.key_mask, group)
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError(
            "inside sequence_parallel windows, and landmarks whose key heads the processes do not divide, take padding "
            "at the end of sequences alone. Pad there, or take heads=True and processes that divide the key heads."
        )


def _by_keys(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, group: Any) -> Tensor:
    """Computes causal landmarks where there are few key heads: a process reads the keys and values of all."""
    from favor.landmark import causal  # which imports this package
    from favor.landmark.attention import ready

    length = query.shape[2]
    if length % causal.BLOCK:
        raise ValueError(
            f"inside sequence_parallel landmarks need pieces of a multiple of {causal.BLOCK} tokens; this one has "
            f"{length}."
        )
    _check_padding(call, group)
    given, (query, key, value) = query.dtype, ready(query, key, value, call)
    every, number = query[:, :, :: causal.STEP], causal.BLOCK // causal.STEP
    key, value, samples = (gathered(own, group).movedim(0, 2).flatten(2, 3) for own in (key, value, every))
    known = causal.past_with(samples.detach(), samples[:, :, :number].detach(), key, value)
    past = torch.full((len(query),), dist.get_rank(group) * length, device=query.device)
    return causal.read_past(known, query, past, False, call.selected_keys, call.scale, call.kernel).to(given)


def _by_features(
    family: PositiveFeatures, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, group: Any
) -> Tensor:
    if call.window and key.shape[2] % call.window:
        raise ValueError(
            f"inside sequence_parallel windows end where pieces do: take pieces of a multiple of window={call.window} "
            f"tokens; this one has {key.shape[2]}."
        )
    if call.window:
        _check_padding(call, group)
    with torch.no_grad():
        call = _with_parameters(family, query, key, call, group)
    parameters, to_query, to_key, offset = prepared(family, query, key, value, call)
    seen = None if call.key_mask is None else call.key_mask[:, None, :]
    bias = key_bias(family.alpha, key, parameters, call.scale, seen, None)
    weight, mean = _state(key, to_key, bias, value)
    states, work = _Gathered.apply(torch.cat([weight.unsqueeze(-1), mean], -1), group)
    near = None
    if call.is_causal or call.window:  # while the states are on their way
        own, options = None, dict[str, Any]()
        if call.window:  # the normaliser is then without the query bias, as that of features is
            own = query_bias(query, parameters, key.shape[1], offset.shape[-1], call.scale, None)
            options = {"window": call.window, "scale": call.scale}
        operands = Operands(query, key, value, to_query, to_key, offset, bias, own)
        near = attention_and_normaliser(operands, call.kernel, is_causal=call.is_causal, **options)[:2]
    work.wait()
    weights, means = states[..., 0].clamp(min=_NOTHING), states[..., 1:]
    if near is None:
        weight, mean = _joined(weights, means)
        return _read(query, to_query, offset + weight, mean)[0].to(query.dtype)
    rank, place = dist.get_rank(group), torch.arange(len(states), device=states.device).view(-1, 1, 1, 1)
    left_out = place >= rank if call.is_causal else place == rank
    weight, mean = _joined(weights.masked_fill(left_out, _NOTHING), means)
    far, far_lse = _read(query, to_query, offset + weight, mean)
    out, lse = near
    both = torch.logaddexp(lse, far_lse)
    here, there = ((part - both).exp().unsqueeze(-1) for part in (lse, far_lse))
    return (here * out + there * far).to(query.dtype)


def _joined(weights: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """Joins states of several sets of keys, log weights `[n, ...]` and mean values `[n, ..., dv]`."""
    total = weights.logsumexp(0)
    return total, ((weights - total).exp().unsqueeze(-1) * means).sum(0)


def _with_parameters(
    family: PositiveFeatures, query: Tensor, key: Tensor, call: AttentionCall, group: Any
) -> AttentionCall:
    """Fits parameters to the tokens of all processes, where a call has none and would fit them to its own."""
    if call.parameters is not None or not family.needs_statistics or call.is_causal or not call.use_statistics:
        return call
    if family.num_queries:
        raise ValueError(
            f"{family.name} fits its parameters to the attention of whole sequences. Inside sequence_parallel call "
            "favor.calibrate first, or take other features: sderf or aderf."
        )
    moments = Moments(*(gathered(own, group) for own in moments_of(family, query, key, call).tensors()))
    shares = []
    for rows, mask in ((query, call.query_padding(query.shape[2], key.shape[2])), (key, call.key_mask)):
        number = torch.full((len(rows),), rows.shape[2], device=rows.device) if mask is None else mask.sum(1)
        counts = gathered(number.to(moments.mean_x), group).unsqueeze(-1)
        shares.append(counts / counts.sum(0).clamp(min=1))
    return replace(call, parameters=family.fit_moments(Moments.pooled_apart(moments, *shares)))


def _in_parts(function: Any, *tensors: Tensor) -> list[Any]:
    """Applies a function to some tokens `[B, H, n, ...]` at a time, and computes it again in the backward pass."""
    parts = zip(*(tensor.split(_ROWS, 2) for tensor in tensors), strict=True)
    if not torch.is_grad_enabled():
        return [function(*part) for part in parts]
    return [checkpoint(function, *part, use_reentrant=False) for part in parts]


def _state(key: Tensor, to_key: Tensor, bias: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gives the log weight `[B, Hk, M]` and the mean value `[B, Hk, M, dv]` of each feature over all keys."""

    def summed(key: Tensor, bias: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        logits = key.to(bias.dtype) @ to_key.to(bias.dtype).mT + bias.unsqueeze(-1)
        weight = logits.clamp(min=_NOTHING).logsumexp(2)
        return weight, (logits - weight.unsqueeze(2)).exp().mT @ value.to(bias.dtype)

    return _joined(*map(torch.stack, zip(*_in_parts(summed, key, bias, value), strict=True)))


def _read(query: Tensor, to_query: Tensor, weight: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Attends with queries `[B, H, n, d]` to features of a weight `[B, Hk, M]`; gives output and normaliser."""
    groups, dtype = query.shape[1] // mean.shape[1], weight.dtype
    directions, weight, mean = (tensor.repeat_interleave(groups, 1) for tensor in (to_query.to(dtype), weight, mean))

    def read(query: Tensor) -> tuple[Tensor, Tensor]:
        logits = query.to(dtype) @ directions.mT + weight.unsqueeze(2)
        return logits.softmax(-1) @ mean, logits.logsumexp(-1)

    out, lse = (torch.cat(parts, 2) for parts in zip(*_in_parts(read, query), strict=True))
    return out, lse
