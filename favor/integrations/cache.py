"""Generation with a state of fixed size in place of a cache of keys and values, or with the keys that matter."""

from __future__ import annotations

from typing import Any

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
from favor.landmark.kept import Kept

CACHE_LAYER = "favor_cache_layer"  # attribute of the keys that a `StreamLayer` passes on


class StreamLayer(CacheLayerMixin):
    """Past of one layer of causal FAVOR attention: per head, M weights and means of values, or what landmarks read.

    `update` passes on the new keys unchanged, marked with this layer, so that the attention function finds the state.
    `place` is the cache and the number of the layer in it; None outside of a `FavorCache`.
    """

    is_sliding = False

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
        self.is_initialized, self._unread = True, True
        self.length += key_states.shape[-2]
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]  # some models ask how many there are
        marked = key_states.view_as(key_states)
        setattr(marked, CACHE_LAYER, self)
        return marked, value_states

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

    def __init__(self, config: PretrainedConfig | None = None) -> None:
        super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = StreamLayer
        whole = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
        self.layers = [_stream_layer(layer) if type(layer) in whole else layer for layer in self.layers]

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
