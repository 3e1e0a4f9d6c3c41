"""Effect of a linear attention backend on the output of a whole model, and errors of single heads at one length."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel

import favor
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import HeadErrors, Variant
from favor.integrations.adapt.observe import observe
from favor.integrations.layer import attention_modules
from favor.train.common.pretrained import load_exact, positions_of
from favor_command.program import in_one_line
from favor_command.saved import load_processor

MASKED = 0.15


def load(path: str, device: torch.device) -> tuple[Any, Any]:
    """Loads the tokenizer of a model, and the part that reads a text, with exact attention."""
    model = text_part(load_exact(path)).to(device).eval()
    return load_processor(path), model


def text_part(model: PreTrainedModel) -> Any:
    """Gives what is measured of a model: a language model whole, since its loss is a score; else all below the head."""
    part: Any = model if measure_of(model) != "cosine" else model.base_model
    if part.main_input_name != "input_ids":
        kind = type(model).__name__
        raise ValueError(f"expected a model that reads text, got a {kind}, whose input is {part.main_input_name}")
    return part


def measure_of(model: PreTrainedModel) -> str:
    """Names the score to compare: "perplexity" of a causal model, "masked-LM loss", or "cosine" of embeddings."""
    name = type(model).__name__
    if name.endswith("ForCausalLM") or name.endswith("LMHeadModel"):
        return "perplexity"
    return "masked-LM loss" if name.endswith("ForMaskedLM") else "cosine"


def switch(model: PreTrainedModel, variant: Variant | None, seed: int) -> PreTrainedModel:
    """Switches a model to a variant in every layer, or to exact attention for None."""
    if variant is None:
        model.set_attn_implementation("sdpa")
        return model
    return favor.configure(model, variant.backend, **variant.options(seed))


def text_inputs(model: PreTrainedModel, sample: Tensor, period: int | None = None) -> dict[str, Tensor]:
    """Makes the arguments of a model from samples `[n, L]`; a decoder with an encoder reads the same tokens."""
    sample = sample.to(model.device)
    both = "decoder_input_ids" in inspect.signature(model.forward).parameters
    names = ("input_ids", "decoder_input_ids") if both else ("input_ids",)
    places = placement(model, sample.shape[1], period).items()
    return {**dict.fromkeys(names, sample), **{name: own.expand(len(sample), -1) for name, own in places}}


def placement(model: PreTrainedModel, length: int, period: int | None) -> dict[str, Tensor]:
    """Makes arguments of the model that repeat its positions, so that long sequences have statistics of real tokens.

    Token i has position i mod period; None repeats the model's positions if a sample has more tokens. Raises ValueError
    if the model has fewer positions, or takes none.
    """
    first, number = positions_of(model)
    if period is None and (number is None or length <= number):
        return {}
    period = period or number
    assert period is not None
    if number is not None and period > number:
        raise ValueError(f"--position_period must be at most the model's {number} positions, got {period}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no position_ids: give samples of at most {number} tokens")
    ids = first + torch.arange(length, device=model.device)[None] % period
    # Without a mask, a decoder takes repeated positions for a sign of packed sequences.
    return {"position_ids": ids, "attention_mask": torch.ones_like(ids)}


def positions(model: PreTrainedModel, length: int, period: int | None = None) -> str:
    """Says in words which positions the tokens have."""
    places = placement(model, length, period)
    if not places:
        return "0, 1, 2, ..."
    ids = places["position_ids"][0]
    return f"repeat every {int((ids - ids[0]).max()) + 1} tokens in longer samples"


@torch.no_grad()
def embeddings(model: PreTrainedModel, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Computes the mean of the last hidden states of each input, `[n, width]`; each is a forward pass of its own."""
    return torch.cat([model(**each).last_hidden_state.mean(1) for each in inputs]).cpu()


@torch.no_grad()
def outputs(model: PreTrainedModel, ids: Tensor, mask_id: int | None, seed: int, period: int | None = None) -> Tensor:
    """Computes the mean-pooled embedding `[n, width]` of each sample, or its loss `[n, 1]`."""
    measure, generator, rows = measure_of(model), torch.Generator().manual_seed(seed), []
    if measure == "cosine":
        return embeddings(model, [text_inputs(model, sample, period) for sample in ids.split(1)])
    if measure == "masked-LM loss" and mask_id is None:
        raise ValueError(f"{type(model).__name__} predicts masked words, and its tokenizer has no mask token")
    for sample in ids.split(1):
        inputs, labels = sample, sample
        if measure == "masked-LM loss":
            hidden = (torch.rand(sample.shape, generator=generator) < MASKED).to(sample.device)
            inputs, labels = sample.masked_fill(hidden, mask_id), sample.masked_fill(~hidden, -100)
        rows.append(model(**text_inputs(model, inputs, period), labels=labels.to(model.device)).loss.view(1, 1))
    return torch.cat(rows).cpu()


def score(measure: str, exact: Tensor, found: Tensor) -> float:
    """Computes the mean cosine with the exact embeddings (1 is best), or the loss or perplexity (less is better)."""
    if measure == "cosine":
        return float(torch.cosine_similarity(exact, found).mean())
    mean = float(found.mean())
    return math.exp(mean) if measure == "perplexity" else mean


@torch.no_grad()
def sentence_similarity(
    model: PreTrainedModel, tokenizer: Any, pairs: Sequence[tuple[str, str]], scores: Sequence[float], batch: int = 64
) -> float:
    """Computes the Spearman correlation of human scores with cosines of mean-pooled embeddings of sentence pairs."""
    texts = sorted(dict.fromkeys(text for pair in pairs for text in pair), key=len)
    found: dict[str, Tensor] = {}
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        inputs = tokenizer(part, padding=True, truncation=True, return_tensors="pt").to(model.device)
        hidden = model(**{**text_inputs(model, inputs["input_ids"]), **inputs}).last_hidden_state
        weights = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        found |= dict(zip(part, pooled.cpu(), strict=True))
    both = torch.stack([torch.stack([found[text] for text in pair]) for pair in pairs])
    cosines = torch.cosine_similarity(both[:, 0], both[:, 1])
    return float(spearmanr(cosines.numpy(), scores).statistic)


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    found: Sequence[Variant],
    mask_id: int | None,
    period: int | None = None,
    **options: Any,
) -> Measured:
    """Measures variants on samples of one length, each a forward pass of its own; options are of `measure_inputs`."""
    inputs = [text_inputs(model, sample, period) for sample in ids.split(1)]
    scored = partial(outputs, ids=ids, mask_id=mask_id, seed=options["seed"], period=period)
    return measure_inputs(model, inputs, found, scored, **options)


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
    """Measures variants on inputs of one length, such as recordings, each a forward pass of its own."""
    kind, scores, others = measure_of(model), {}, others or {}
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
            switched = switch(others.get(variant, model), variant, seed)
            scores[variant] = score(kind, exact, outputs(switched))
    switch(model, None, seed)
    return Measured(heads.length, len(inputs), heads, score(kind, exact, exact), scores)
