"""Errors of single heads and the score of the whole model, at one length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from favor.eval.approximation import model as whole
from favor.eval.approximation.heads import HeadErrors
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import Variant
from favor.integrations.adapt.observe import observe
from favor.integrations.layer import attention_modules
from favor_command.program import in_one_line


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
        model: any model that reads tokens; it has exact attention afterwards.
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
    inputs = [whole.text_inputs(model, sample, period) for sample in ids.split(1)]
    outputs = partial(whole.outputs, ids=ids, mask_id=mask_id, seed=seed, period=period)
    return measure_inputs(model, inputs, found, outputs, seed=seed, query_samples=query_samples, others=others)


def measure_inputs(
    model: PreTrainedModel,
    inputs: Sequence[Mapping[str, Tensor]],
    found: Sequence[Variant],
    outputs: Callable[[PreTrainedModel], Tensor],
    *,
    seed: int = 0,
    query_samples: int | None = None,
    others: Mapping[Variant, PreTrainedModel] | None = None,
) -> Measured:
    """Measures variants on inputs of one length, such as recordings, each a forward pass of its own.

    Args:
        model: any model; it has exact attention afterwards.
        inputs: arguments of the model, by name.
        found: the variants to compare.
        outputs: computes what is scored, from a model with any attention; see `favor.eval.approximation.model.score`.
        seed, query_samples, others: as for `measure`.

    Returns:
        Errors of the heads, and the score of the whole model with exact attention and with each variant.

    Raises:
        ValueError: before anything is measured, if the model cannot be scored on these inputs alone.
    """
    kind, scores, others = whole.measure_of(model), {}, others or {}
    try:
        exact = outputs(model)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be measured: {in_one_line(error)}") from error
    modules = {variant.folder: attention_modules(other) for variant, other in others.items() if variant.folder}
    heads = HeadErrors(found, seed, query_samples, modules)
    with torch.no_grad(), observe(model, heads):
        for each in inputs:
            model(**each)
    if not heads.errors:
        raise ValueError(f"{type(model).__name__} has no attention layer that can be linear: see favor.describe")
    for variant in found:
        if variant.is_backend:
            switched = whole.switch(others.get(variant, model), variant, seed)
            scores[variant] = whole.score(kind, exact, outputs(switched))
    whole.switch(model, None, seed)
    return Measured(heads.length, len(inputs), heads, whole.score(kind, exact, exact), scores)
