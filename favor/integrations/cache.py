"""Generation with a state of fixed size in place of a cache of keys and values, or with the keys that matter."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from favor.kernels import StreamState
from favor.kernels.dispatch import is_tracing, on_cpu
from favor.landmark.kept import Kept

CACHE_LAYER = "favor_cache_layer"  # attribute of the keys that a `StreamLayer` passes on


class StreamLayer(CacheLayerMixin):
    """Past of one layer of causal FAVOR attention: per head, M weights and means of values, or what landmarks read.

    `update` passes on the new keys unchanged, marked with this layer, so that the attention function finds the state.
    `place` is the cache and the number of the layer in it; None outside of a `FavorCache`.
    """

    is_sliding = False
    length: Any  # tokens seen: a number, or a tensor with room for all tokens

    def __init__(self) -> None:
        super().__init__()
        self.place: tuple[FavorCache, int] | None = None
        StreamLayer.reset(self)

    def reset(self) -> None:
        """Forgets everything."""
        self.state, self.length, self._unread = StreamState(), 0, False
        self.is_initialized, self.keys, self.values = False, None, None
        self._options: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the state knows its sizes when it has seen a token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Passes on new keys and values `[B, Hk, L, d]`, which the attention function then adds to the state."""
        self._check()
        self._count(key_states, value_states)
        self.is_initialized, self._unread = True, True
        marked = key_states.view_as(key_states)
        setattr(marked, CACHE_LAYER, self)
        return marked, value_states

    def _count(self, key_states: Tensor, value_states: Tensor) -> None:
        self.length += key_states.shape[-2]
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]  # some models ask how many there are

    def covered(self, new: int) -> int:
        """Gives how many keys a mask is about, of which the last `new` come with the call."""
        return int(self.length)

    def _check(self) -> None:
        if self._unread:
            raise RuntimeError(
                "a layer did not read the state of its FavorCache, so that its last tokens saw no earlier ones, or the "
                "last pass was refused: then call reset() and begin again. The cache is for causal layers with a FAVOR "
                'backend (attn_implementation="favor#"), in models that pass their cached keys to attention '
                "unchanged; a model that also has sliding windows needs FavorCache(model.config). Other models need "
                "transformers' DynamicCache."
            )

    def read(self, options: Any) -> StreamState:
        """Gives the state to attention, which goes on from it and changes it.

        `options` are all that the state depends on, and must be equal for all tokens.
        """
        if not self._unread:
            raise RuntimeError(
                "two attention layers read the same cached keys, as in models that share them between layers; a "
                "FavorCache cannot tell the layers apart: use transformers' DynamicCache."
            )
        if self.state.memory is not None and self._options != options:
            raise ValueError(
                "the backend or its options have changed since the first tokens of this FavorCache (redraw_interval in "
                "training changes the directions too): call reset() and begin again."
            )
        self._unread, self._options = False, options
        if self.place is not None:
            cache, number = self.place
            if cache.layers[number] is not self:
                cache.layers[number] = self
        return self.state

    def keep(self, key: Tensor, value: Tensor) -> None:
        """Puts a layer that keeps keys, of all tokens so far, in its own place, since attention is not causal."""
        if self.place is None or self.length != key.shape[-2]:
            raise ValueError("a FavorCache is for causal layers, and this one is not: use transformers' DynamicCache.")
        cache, number = self.place
        layer = DynamicLayer()
        layer.update(key, value)
        cache.layers[number] = layer

    def get_seq_length(self) -> int:
        """Gives the number of tokens seen."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Gives length and offset of the keys that a mask is about: all keys, so that padding is found in its place."""
        self._check()  # masks are made before the layers run
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Gives -1: there is no maximum length."""
        return -1

    def crop(self, tokens: int) -> None:
        """Forgets the last tokens, if the state keeps all keys: -tokens of them, or if positive all but `tokens`."""
        tokens = int(tokens)  # assisted generation of transformers 5.17 passes a tensor
        forgotten = -tokens if tokens <= 0 else max(self.length - tokens, 0)
        if forgotten == 0:
            return
        if not isinstance(self.state.memory, Kept) or forgotten > self.state.shown:
            raise ValueError(
                f"a FavorCache cannot forget its last {forgotten} tokens, as assisted generation asks. With landmarks "
                "it can forget those that came after the last padded piece of a batch. Use transformers' DynamicCache "
                "instead."
            )
        self.state.memory.forget(forgotten)
        self.state.tokens -= forgotten
        self.state.shown -= forgotten
        self.length -= forgotten

    def offload(self) -> None:
        """Does nothing: the state is small."""

    def prefetch(self) -> None:
        """Does nothing: the state is small."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows of the batch in another order, for beam search."""
        self.state.change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch."""
        self.state.change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows of the batch."""
        self.state.change(lambda tensor: tensor[indices])


class StaticStreamLayer(StreamLayer):
    """A `StreamLayer` for compiled programs and CUDA graphs, with room for N tokens.

    Its tensors keep their addresses, also after `reset`, and no number on the host changes from token to token: the
    tensor `length` says how many there were. Masks are about the new tokens alone.
    """

    is_compileable = True

    def __init__(self, max_cache_len: int) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.state = StreamState(room=max_cache_len)
        self._full = (  # a compiler makes no texts of numbers
            f"a FavorCache with max_cache_len={max_cache_len} has no room for more. Make one with a larger "
            "max_cache_len, or one without it, which grows."
        )
        with torch.inference_mode(False):  # what is made in it cannot be changed in place outside of it
            self.length = torch.zeros((), dtype=torch.int64)

    def reset(self) -> None:
        """Forgets everything, and keeps the memory for the next tokens."""
        state, length = self.state, self.length
        super().reset()
        state.restart()
        self.state, self.length = state, length.zero_()

    def _count(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.keys is None:
            self.keys, self.values = (
                rows.new_empty(*rows.shape[:2], 0, rows.shape[3]) for rows in (key_states, value_states)
            )
            with torch.inference_mode(False):
                self.length = self.length.to(key_states.device)
            if not is_tracing(key_states):
                torch._dynamo.mark_static_address(self.length)
        self.length.add_(key_states.shape[-2])
        if is_tracing(key_states) or (key_states.shape[-2] == 1 and not on_cpu(self.length)):  # without waiting
            torch._assert_async(self.length <= self.max_cache_len, self._full)
        elif int(self.length) > self.max_cache_len:
            raise ValueError(f"got {int(self.length)} tokens in all: {self._full}")

    def covered(self, new: int) -> int:
        """Gives the number of new keys."""
        return new

    def keep(self, key: Tensor, value: Tensor) -> None:
        """Raises a ValueError: layers that are not causal keep keys of any number."""
        raise ValueError("a FavorCache with max_cache_len is for causal layers, and this one is not: leave it out.")

    def get_seq_length(self) -> Any:
        """Gives the number of tokens seen; after the first ones as a tensor, as transformers' `StaticLayer` does."""
        return self.length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Gives length and offset of the keys that a mask is about, the new ones."""
        self._check()
        return query_length, self.length

    def get_max_length(self) -> int:
        """Gives N."""
        return self.max_cache_len

    def crop(self, tokens: int) -> None:
        """Raises a ValueError: the host does not know how many tokens there are."""
        raise ValueError(
            "a FavorCache with max_cache_len cannot forget its last tokens, as assisted generation asks: leave it out."
        )


class _LinearAttentionAndStreamLayer(LinearAttentionLayer, StreamLayer):  # type: ignore[misc,override]
    """Past of a layer that has two kinds: states of the model itself (a convolution's), and causal FAVOR attention."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        StreamLayer.__init__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:  # for the states of the model itself, by name
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        StreamLayer.reset(self)

    def crop(self, tokens: int) -> None:
        StreamLayer.crop(self, tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        StreamLayer.reorder_cache(self, beam_idx)


def _stream_layer(layer: Any) -> StreamLayer:
    """Makes a layer that keeps a state in place of one that keeps keys, with the other states of that layer."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return StreamLayer()
    stream = _LinearAttentionAndStreamLayer(layer.number_of_states)
    for name in vars(LinearAttentionLayer()):
        setattr(stream, name, getattr(layer, name))
    return stream


class FavorCache(DynamicCache):
    """Cache for `generate` whose size, and so the time per token, does not grow (except with landmarks).

        favor.configure(model, "favor#", exact_below=0)
        model.generate(**inputs, past_key_values=favor.FavorCache(model.config))

    Landmarks need all keys and values: the cache then grows as a `DynamicCache` does, with a copy of every fourth
    coordinate of the keys for each query head, but each token reads few of them.

    Layers of full attention keep the state of `favor.kernels.extend`, and so does every other layer whose attention is
    estimated, whatever the config calls it; layers that stay exact (sliding windows, cross attention) keep their keys
    as in a `DynamicCache`. Results are those of a `DynamicCache` with the same backend up to rounding; with landmarks,
    those of a run without a cache. Sampling, beam search, continued prompts and batches padded on the left work.
    Assisted generation works with landmarks, since a token cannot be taken out of a sum again. Exact heads,
    `exact_below` above 0 and layers that share keys are refused. The first piece of a sequence is computed like any
    causal attention; later pieces of many tokens are slower. If a layer does not read its state, the next pass raises
    an error. An encoder-decoder takes `EncoderDecoderCache(FavorCache(), DynamicCache())`.

    Args:
        config: of the model. Default None: all layers are of full attention.
        max_cache_len: N, to make room for N tokens at once. Decoding then compiles into one program for all tokens, or
            a CUDA graph. Landmarks choose anew at each token. Default None: the cache grows.

    Raises:
        ValueError: if `max_cache_len` is less than 1, or given for a model with sliding windows or states of its own.

    Example:
        >>> import torch, favor
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, eos_token_id=None, **sizes))
        >>> model = favor.configure(model, "landmark", selected_keys=32, exact_below=0)
        >>> cache = favor.FavorCache(model.config)
        >>> ids = torch.arange(6)[None]
        >>> out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, past_key_values=cache)
        >>> cache.get_seq_length()
        7
    """

    def __init__(self, config: PretrainedConfig | None = None, max_cache_len: int | None = None) -> None:
        super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = StreamLayer
        if max_cache_len is not None:
            self._make_static(max_cache_len, config)
            return
        whole = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
        self.layers = [_stream_layer(layer) if type(layer) in whole else layer for layer in self.layers]

    def _make_static(self, max_cache_len: int, config: PretrainedConfig | None) -> None:
        if max_cache_len < 1:
            raise ValueError(
                f"max_cache_len must be at least 1, the number of tokens to make room for; got {max_cache_len}."
            )
        kinds = {type(layer).__name__ for layer in self.layers} - {"DynamicLayer"}
        if kinds:
            raise ValueError(
                "max_cache_len is for models whose layers are all of full attention, and this one has layers that need "
                f"a {', '.join(sorted(kinds))}: leave it out."
            )
        made = partial(StaticStreamLayer, max_cache_len)
        self.layers = [made() for _ in self.layers]
        if config is None:
            self.layer_class_to_replicate = made  # type: ignore[assignment]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Passes on the keys and values that attention needs: with a state the new ones, else all that a layer sees.

        Layers may differ from what a config says of them. So the first keys of a layer with a window come with a state
        too; if attention reads the state, the layer keeps it from then on, otherwise it keeps its keys.
        """
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, DynamicLayer) and layer.is_sliding and layer.get_seq_length() == key_states.shape[-2]:
            layer = _stream_layer(layer)
            keys, values = layer.update(keys, values)
        if isinstance(layer, StreamLayer):
            layer.place = (self, layer_idx)
        return keys, values

    def reset(self) -> None:
        """Forgets everything. Keys are dropped: transformers 5.17 makes them zeros, and new ones would follow those."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                layer.keys, layer.values, layer.is_initialized = None, None, False
        super().reset()

    @property
    def nbytes(self) -> int:
        """Bytes of states, keys and values."""
        states = [layer.state.nbytes for layer in self.layers if isinstance(layer, StreamLayer)]
        others = (getattr(layer, name, None) for layer in self.layers for name in ("keys", "values"))
        return sum(states) + sum(tensor.nbytes for tensor in others if tensor is not None)
