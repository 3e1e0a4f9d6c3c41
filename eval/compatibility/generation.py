"""Checks that a `FavorCache` gives the logits of a run without a cache, or says why it cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import favor
from favor.integrations.cache import StreamLayer

PROMPT, TOLERANCE = 16, 1e-4


def generation(exact: PreTrainedModel, model: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Compares logits with a `FavorCache`, for a prompt and then token by token, with logits without a cache.

    Args:
        exact: the model with exact attention.
        model: the model with the backend, its options set.
        inputs: with `input_ids` `[B, L]`.

    Returns:
        "equal" with the number of layers that keep a state, "refused", "wrong" or "crash" with the reason, or "not run"
        with the reason, for example if transformers' own cache does not give the logits without a cache either.
    """
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or len(inputs) > 1:
        return "not run: no plain tokens"
    try:
        if _distance(_by_token(exact, ids, DynamicCache(config=exact.config)), _whole(exact, ids)) > TOLERANCE:
            return "not run: DynamicCache differs from no cache with exact attention"
    except Exception as error:
        return f"not run: DynamicCache fails with exact attention ({type(error).__name__})"
    cache = favor.FavorCache(model.config)
    try:
        found = _by_token(model, ids, cache)
    except (ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        return f"{'refused' if 'FavorCache' in text or 'favor' in text else 'crash'}: {text[:160]}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    states = sum(isinstance(layer, StreamLayer) for layer in cache.layers)
    distance = _distance(found, _whole(model, ids))
    if not distance < TOLERANCE:
        return f"wrong: {distance:.1e}"
    return f"equal: {states} of {len(cache.layers)} layers keep a state"


@torch.no_grad()
def _whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 :]


@torch.no_grad()
def _by_token(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    logits = [model(input_ids=ids[:, :PROMPT], past_key_values=cache, use_cache=True).logits[:, -1:]]
    for token in ids[:, PROMPT:].split(1, 1):
        logits.append(model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:])
    return torch.cat(logits, 1)


def _distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
