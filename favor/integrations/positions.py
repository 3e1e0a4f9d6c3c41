"""Relative positions of models of transformers: their layers give a table of biases in place of those of all pairs.

transformers makes these biases before it calls the attention function, for all pairs of tokens. So what makes them is
wrapped, once for each class: while a FAVOR backend runs, it gives `Clipped` or `Sinusoidal`, which the attention
function reads. Checked on transformers 5.17 to 5.23.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor import registry
from favor.attention.positions import Clipped, Sinusoidal
from favor.integrations.layer import layer_options
from favor.integrations.modules import is_wrapped, wrap_once
from favor.kernels.dispatch import is_tracing

OBSERVER = "favor_observe"  # backend of `favor.integrations.adapt.observe`
_FRAMES = 2**13  # of audio that pass the convolutions at a time


def adopt(model: nn.Module) -> None:
    """Wraps what makes relative positions in the classes of the layers of a model."""
    for module in model.modules():
        kind: Any = type(module)
        if "past_seen_tokens" in _parameters(getattr(kind, "compute_bias", None)):
            _wrap(kind, "compute_bias", _bucketed)
            if "position_bias" in _parameters(kind.forward):
                _wrap(kind, "forward", _without_zeros)
        for name, around in _FUNCTIONS.items() if hasattr(module, "position_embeddings_type") else ():
            space = sys.modules[kind.__module__]
            if hasattr(space, name):
                _wrap(space, name, around)
        if kind.__name__ == "ParakeetEncoderAttention":
            _wrap(kind, "forward", _parakeet_attention)
        elif kind.__name__ == "ParakeetEncoderRelPositionalEncoding":
            _wrap(kind, "forward", _no_waves)
        elif kind.__name__ == "ParakeetEncoder":
            _wrap(kind, "_get_output_attention_mask", _parakeet_padding)
            before: Any = module.subsampling
            before.favor_config = module.config
            _wrap(type(before), "forward", _in_pieces)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts `around` around a method or a function of a layer, once; it is called while a FAVOR backend runs."""

    def chosen(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        config = layer.favor_config if hasattr(layer, "favor_config") else layer.config
        if config._attn_implementation in registry.BACKENDS or config._attn_implementation == OBSERVER:
            return around(original, layer, *args, **kwargs)
        return original(layer, *args, **kwargs)

    wrap_once(owner, name, chosen)


def _parameters(function: Any) -> Collection[str]:
    return () if function is None else inspect.signature(function).parameters


def gives_tables(layer: nn.Module) -> bool:
    """Tells whether a layer gives its positions as a table."""
    kind, space = type(layer), sys.modules[type(layer).__module__]
    made = [getattr(kind, "compute_bias", None), *(getattr(space, name, None) for name in _FUNCTIONS)]
    return any(map(is_wrapped, made))


def _bucketed(original: Any, layer: Any, length: int, keys: int, *args: Any, **kwargs: Any) -> Any:
    """Gives the biases of T5's buckets by distance: behind the largest one all are equal (Raffel et al., 2020)."""
    most = layer.relative_attention_max_distance
    right = 0 if layer.is_decoder else most
    table = original(layer, 1, most + 1 + right, past_seen_tokens=most)[0, :, 0]
    return Clipped(table.new_ones(1, 1, 1, 1), table.unsqueeze(-1), most, right)


def _without_zeros(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives layers without positions, such as cross attention, one zero, where they would make one for each pair."""
    missing = len(args) < 4 and kwargs.get("position_bias") is None
    if missing and not layer.has_relative_attention_bias:
        kwargs["position_bias"] = next(layer.parameters()).new_zeros(1, 1, 1, 1)
    return original(layer, *args, **kwargs)


def _relative_keys(original: Any, layer: Any, query: Tensor, key: Tensor) -> Any:
    """Gives the products of queries with the embeddings of clipped distances (Shaw et al., 2018)."""
    answers = layer.distance_embedding.weight.to(query.dtype).unsqueeze(0)
    reach = (layer.left_max_position_embeddings, layer.right_max_position_embeddings)
    return query, Clipped(query * layer.scaling, answers, *reach)


def _relative_waves(original: Any, layer: Any, query: Tensor, key: Tensor, position: Tensor) -> Any:
    content, asked = (query + bias[None, :, None] for bias in (layer.pos_bias_u, layer.pos_bias_v))
    return content, _waves(layer, asked, layer.linear_pos.weight, layer.scaling)


def _waves(layer: Any, query: Tensor, weight: Tensor, scale: float) -> Sinusoidal:
    name, options = layer_options(layer, layer.config._attn_implementation)
    frequencies = None if name is None else options.get("frequencies")
    return Sinusoidal(query, weight.unflatten(0, (query.shape[1], -1)), scale, frequencies=frequencies)


def _parakeet_attention(
    original: Any,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor | None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Computes the attention of FastConformer (Rekesh et al., 2023) without biases of all pairs."""
    shape = (*hidden_states.shape[:2], -1, layer.head_dim)
    query, key, value = (
        project(hidden_states).view(shape).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    content, asked = (query + bias[None, :, None] for bias in (layer.bias_u, layer.bias_v))
    padding = attention_mask.real if isinstance(attention_mask, _Padding) else attention_mask
    if padding is not None and padding.ndim == 4:  # who sees whom: a token that sees itself is real
        padding = padding.diagonal(dim1=-2, dim2=-1)[:, 0]
    attend: Any = ALL_ATTENTION_FUNCTIONS[layer.config._attn_implementation]
    out, weights = attend(
        layer,
        content,
        key,
        value,
        padding,
        dropout=layer.attention_dropout if layer.training else 0.0,
        scaling=layer.scaling,
        is_causal=False,
        position_bias=_waves(layer, asked, layer.relative_k_proj.weight, layer.scaling),
        **kwargs,
    )
    return layer.o_proj(out.flatten(2)), weights


def _no_waves(original: Any, layer: Any, hidden_states: Tensor) -> Tensor:
    """Gives nothing for the sines and cosines of all distances `[B, 2 L - 1, D]`, which `Sinusoidal` makes itself."""
    return hidden_states[:, :0]


# Functions of the families of Wav2Vec2-BERT and Wav2Vec2-Conformer.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_apply_relative_key_position_encoding": _relative_keys,
    "_apply_relative_position_encoding": _relative_waves,
}


class _Padding:
    """Stands for the mask of all pairs that `ParakeetEncoder` makes of its padding, and holds the padding alone.

    It answers what the encoder and its layers do with a mask `[B, 1, L, L]`.

    Attributes:
        real: boolean `[B, L]`, True for real frames.
    """

    dtype = torch.bool

    def __init__(self, real: Tensor) -> None:
        self.real = real

    def _same(self, *_: Any) -> _Padding:
        return self

    unsqueeze = expand = transpose = __and__ = __invert__ = _same

    def int(self) -> Tensor:
        return self.real.int()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.all:
            raise TypeError(f"the padding of favor's Parakeet knows no {function}.")
        return ~args[0].real.unsqueeze(1)  # of the inverted mask: rows of frames that are padding


def _parakeet_padding(original: Any, encoder: Any, *args: Any, **kwargs: Any) -> Any:
    return _Padding(original(encoder, *args, **kwargs))


def _in_pieces(original: Any, layer: Any, input_features: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Gives what the convolutions give for all frames at once, but holds what they need for some."""
    factor, frames = layer.stride**layer.num_layers, input_features.shape[1]
    if frames <= _FRAMES or layer.kernel_size > layer.stride + 1:
        return original(layer, input_features, attention_mask)
    outs = []
    for first in range(0, frames, _FRAMES):
        begin = max(first - factor, 0)  # an output needs less than `factor` frames before its own
        mask = None if attention_mask is None else attention_mask[:, begin : first + _FRAMES]
        outs.append(original(layer, input_features[:, begin : first + _FRAMES], mask)[:, (first - begin) // factor :])
    return torch.cat(outs, 1)


def relative_of(layer: nn.Module, bias: Any) -> Any:
    """Reads the argument `position_bias` of a layer: None, `Clipped`, `Sinusoidal`, or biases that are neither."""
    if not isinstance(bias, Tensor):
        return bias
    biased = getattr(layer, "has_relative_attention_bias", True)
    if bias.numel() == 1 or not (biased or is_tracing(bias) or bool(bias.any())):  # nothing but zeros
        return None
    found = None if is_tracing(bias) else detect(bias)
    return bias if found is None else found


def detect(bias: Tensor) -> Clipped | None:
    """Finds the table of biases `[1 or B, H, L, L]` that depend on the distance alone; None for others."""
    same = bias.shape[0] == 1 or bias.stride(0) == 0 or bool((bias[1:] == bias[:1]).all())
    if not same or bias.shape[2] != bias.shape[3] or not bool((bias[..., 1:, 1:] == bias[..., :-1, :-1]).all()):
        return None
    row, column = bias[0, :, 0], bias[0, :, :, 0]
    left, right = (_tail(own.detach()) for own in (column, row))
    table = torch.cat([column[:, 1 : left + 1].flip(1), row[:, : right + 1]], 1)
    return Clipped(table.new_ones(1, 1, 1, 1), table.unsqueeze(-1), left, right)


def _tail(biases: Tensor) -> int:
    """Gives the distance from which biases `[H, L]` are equal."""
    differs = (biases != biases[:, -1:]).any(0).nonzero()
    return int(differs[-1]) + 1 if len(differs) else 0
