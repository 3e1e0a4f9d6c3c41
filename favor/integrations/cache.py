"""Generation with a state of fixed size in place of a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from favor.kernels import StreamState

CACHE_LAYER = "favor_cache_layer"  # attribute of the keys that a `StreamLayer` hands on


class StreamLayer(CacheLayerMixin):
    """Past of one layer of causal FAVOR attention: per head, M weights and means of values, or M groups of keys.

    `update` hands the new keys on as they are, marked with this layer, so that the attention function finds the state.

    Attributes:
        state: of `favor.kernels.extend`.
        length: tokens seen.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state, self.length, self._unread = StreamState(), 0, False
        self._options: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the state knows its sizes when it has seen a token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands on new keys and values `[B, Hk, L, d]`, which the attention function then adds to the state.

        Raises:
            RuntimeError: if the last ones were not added.
        """
        self._check()
        self.is_initialized, self._unread = True, True
        self.length += key_states.shape[-2]
        marked = key_states.view_as(key_states)
        setattr(marked, CACHE_LAYER, self)
        return marked, value_states

    def _check(self) -> None:
        if self._unread:
            raise RuntimeError(
                "a layer did not read the state of its FavorCache, so that its last tokens saw no earlier ones, or the "
                "last pass was refused: then call reset() and begin again. The cache is for causal layers with a FAVOR "
                'backend (attn_implementation="favor#"), in models that hand their cached keys to attention as '
                "they are; a model with sliding windows too needs FavorCache(model.config). Others need "
                "transformers' DynamicCache."
            )

    def read(self, options: Any) -> StreamState:
        """Gives the state to attention, which goes on from it and changes it.

        Args:
            options: all that the state depends on; the same for all tokens.

        Raises:
            RuntimeError: if the new tokens were read before.
            ValueError: if the options are not those of the first tokens.
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
        return self.state

    def get_seq_length(self) -> int:
        """Gives the number of tokens seen."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Gives length and offset of the keys that a mask is about: all keys, so that padding is found in its place.

        Raises:
            RuntimeError: as in `update`; a mask is made before the layers run.
        """
        self._check()
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Gives -1: sequences have no greatest length."""
        return -1

    def reset(self) -> None:
        """Forgets everything."""
        self.__init__()  # type: ignore[misc]

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: what a sum holds cannot be taken out of it again.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a FavorCache cannot forget its last tokens, which assisted generation asks for: use transformers' "
            "DynamicCache there."
        )

    def offload(self) -> None:
        """Nothing to do: the state is small."""

    def prefetch(self) -> None:
        """Nothing to do: the state is small."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows of the batch in another order, for beam search."""
        self.state.change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row of the batch."""
        self.state.change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows of the batch."""
        self.state.change(lambda tensor: tensor[indices])


class FavorCache(DynamicCache):
    """Cache for `generate` whose size, and so the time of a token, does not grow with the length.

        favor.configure(model, "favor#", exact_below=0)
        model.generate(**inputs, past_key_values=favor.FavorCache(model.config))

    Layers of full attention keep the state of `favor.kernels.extend`; the others of a hybrid model (sliding windows)
    what they keep in a `DynamicCache`. Results are those of a `DynamicCache` with the same backend up to rounding; with
    landmarks, those of no cache. Sampling, beam search, prompts that are continued and batches padded at the left work;
    exact heads, `exact_below` above 0, assisted generation and layers that share keys are refused. The first piece of a
    sequence is computed like any causal attention, later ones of many tokens less fast. A layer that does not read its
    state is noticed at the next pass. An encoder-decoder takes `EncoderDecoderCache(FavorCache(), DynamicCache())`.

    Args:
        config: of the model. Default None: all layers are of full attention.
    """

    def __init__(self, config: PretrainedConfig | None = None) -> None:
        super().__init__(config=config)
        if config is None:
            self.layer_class_to_replicate = StreamLayer
        self.layers = [StreamLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of states, keys and values."""
        states = [layer.state.nbytes for layer in self.layers if isinstance(layer, StreamLayer)]
        others = (getattr(layer, name, None) for layer in self.layers for name in ("keys", "values"))
        return sum(states) + sum(tensor.nbytes for tensor in others if tensor is not None)


def state_of(layer: StreamLayer, query: Tensor, options: Any) -> StreamState:
    """Gives the state that the queries of a call go on from.

    Args:
        layer: where the keys come from.
        query: `[B, H, L, d]`.
        options: all that the state depends on; the same for all tokens.

    Raises:
        RuntimeError: if gradients are wanted, which a state does not pass on, or the new tokens were read before.
        ValueError: if the options are not those of the first tokens.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        raise RuntimeError(
            "a FavorCache is for inference and passes no gradient to past tokens: use torch.no_grad() and a new cache."
        )
    return layer.read(options)
