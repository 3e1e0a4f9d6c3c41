"""Errors of single heads and the score of the whole model, at one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from favor.eval.approximation import model as whole
from favor.eval.approximation.heads import HeadErrors
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import Variant
from favor.integrations.adapt.observe import observe
from favor.integrations.layer import attention_modules


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    found: Sequence[Variant],
    *,
    mask_id: int | None = None,
    seed: int = 0,
    query_samples: int | None = None,
    period: int | None = None,
    others: Mapping[Variant, PreTrainedModel] | None = None,
) -> Measured:
    """Measures variants on samples of one length, each sample a forward pass of its own.

    Args:
        model: any model; it has exact attention afterwards.
        ids: samples `[n, L]`.
        found: the variants to compare.
        mask_id: the tokenizer's mask token, for a masked-LM model.
        seed: draws random directions and masks.
        query_samples: greatest number of queries whose errors count, as in `HeadErrors`.
        period: of the positions, as in `favor.eval.approximation.model.placement`.
        others: converted models, for variants with a folder.

    Returns:
        Errors of the heads, and the score of the whole model with exact attention and with each variant.
    """
    others = others or {}
    modules = {variant.folder: attention_modules(other) for variant, other in others.items() if variant.folder}
    heads = HeadErrors(found, seed, query_samples, modules)
    places = whole.placement(model, ids.shape[1], period)
    with torch.no_grad(), observe(model, heads):
        for sample in ids.split(1):
            model(input_ids=sample.to(model.device), **places)
    kind, inputs = whole.measure_of(model), (ids, mask_id, seed, period)
    exact, scores = whole.outputs(model, *inputs), {}
    for variant in found:
        if variant.is_backend:
            switched = whole.switch(others.get(variant, model), variant, seed)
            scores[variant] = whole.score(kind, exact, whole.outputs(switched, *inputs))
    whole.switch(model, None, seed)
    return Measured(ids.shape[1], len(ids), heads, whole.score(kind, exact, exact), scores)
