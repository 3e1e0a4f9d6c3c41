"""Parameters of the estimator fixed from data, one set per head, kept in the model as buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from favor import features as families
from favor.config import FavorConfig, feature_family
from favor.features import Moments, Parameters, PositiveFeatures
from favor.integrations.adapt.feature_weights import Samples, fit_weights
from favor.integrations.adapt.observe import Observation, observe_batches
from favor.integrations.backend import model_options
from favor.integrations.configure import configure
from favor.integrations.layer import attention_modules, stored_choice
from favor.integrations.stored import drop_own, store_parameters, weights_of

REFINE_STEPS = 300


class Statistics:
    """Moments, as the family takes them, of queries and keys of every layer and head, over any number of batches."""

    def __init__(self, features: PositiveFeatures) -> None:
        self.features = features
        self.layers: dict[int, tuple[Moments, float]] = {}
        self.longest = 0

    def __call__(self, seen: Observation) -> None:
        """Adds one call of a layer; each sequence counts by its number of tokens."""
        batch, key_heads, length = *seen.key.shape[:2], seen.query.shape[2]
        groups = seen.query.shape[1] // key_heads
        # One set of moments for each sequence and query head, [B, Hk, G, ...]; the heads of a group are pooled.
        x, y = seen.query.unflatten(1, (key_heads, groups)), seen.key.unsqueeze(2).expand(-1, -1, groups, -1, -1)
        masks = [
            None if mask is None else mask[:, None, None].expand(-1, key_heads, groups, -1)
            for mask in (seen.query_padding, seen.padding)
        ]
        moments = self.features.moments(x, y, *masks, scale=seen.scale, is_causal=seen.is_causal)
        flat = Moments(*(t.transpose(1, 2).flatten(0, 1).double().cpu() for t in moments.tensors()))
        count = torch.full((batch,), length) if seen.padding is None else seen.padding.sum(-1).cpu()
        pooled, total = Moments.pooled(flat, count.repeat_interleave(groups)), float(count.sum())
        self.longest = max(self.longest, length)
        if seen.layer in self.layers:
            before, weight = self.layers[seen.layer]
            both = Moments(*(torch.stack(pair) for pair in zip(before.tensors(), pooled.tensors(), strict=True)))
            pooled, total = Moments.pooled(both, torch.tensor([weight, total])), weight + total
        self.layers[seen.layer] = (pooled, total)

    def parameters(self) -> dict[int, Parameters]:
        """Fits the parameters of every layer in closed form, `[Hk, d, d]`."""
        return {number: self.features.fit_moments(moments) for number, (moments, _) in sorted(self.layers.items())}

    def rho(self) -> dict[int, Tensor]:
        """Gives the mean log(1 + Var / K^2) of every layer and head `[Hk]`; below log M, M features suffice."""
        parameters = self.parameters()
        return {number: parameters[number].rho(moments) for number, (moments, _) in sorted(self.layers.items())}


def calibrate(
    model: PreTrainedModel,
    dataloader: Iterable[Any],
    *,
    attn_implementation: str = "favor#",
    max_batches: int | None = None,
    feature_weights: bool = False,
    refine_steps: int | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Fixes the parameters of the estimator (G, L and the key shift of each head) from data, and uses them from now on.

    The model runs over the data with exact attention; the parameters are the closed form of the family (by default
    wDERF, with the keys weighted by the attention they get) for the pooled statistics. They become buffers of the
    attention modules, `save_pretrained` writes them and `from_pretrained` reads them. Causal layers can use them, since
    they do not depend on the sequence at hand.

    Args:
        model: any transformers model that the backends accept.
        dataloader: batches: dictionaries of the model's arguments (`labels` are left out), or tensors of input_ids for
            the part below the head. A few thousand tokens of the kind the model will see are enough.
        attn_implementation: backend to calibrate and to switch to, with statistics: "favor#" (default) or "favor++";
            "favor+" with feature_weights.
        max_batches: number of batches after which to stop; None (default) takes all.
        feature_weights: whether to learn nonnegative weights of the features of each head too, from the divergence
            between softmax attention and its estimate in 16 sequences of the data (128 queries of each). They enter
            the offsets of the keys, so attention costs no more than before. They fit only the directions and the window
            they were learned with: num_features, seed, orthogonal, window and exact heads can no longer change, and
            redraw_interval must be 0. With too little data they fit that data and no other. Default False.
        refine_steps: with feature_weights, gradient steps by which "wderf" and "cderf" (the default of favor#) adapt G,
            L and shift to the same divergence; default 300 for these two, a minute or two for a small model on one
            core. The other families keep the parameters of their papers: 0 is their default and only value.
        **options: fields of `FavorConfig` to set, as in `favor.configure`.

    Returns:
        The model, with `statistics="calibrated"`.

    Raises:
        ValueError: for a backend without parameters, a bad option, data that give no parameters, or feature weights
            with redraw_interval above 0 or from sequences that a window covers.

    Source: FAVOR#, equation (14) and Theorems 4.2 and 4.3 with pooled statistics; see `favor.features.WDERF`. Weights:
    `favor.decomposition.mixture_proportions`; learning them, and the parameters with them, is an addition of this
    package.

    Example:
        >>> import torch, favor
        >>> from transformers import BertConfig, BertModel
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = favor.calibrate(BertModel(tiny), [torch.arange(12).view(2, 6)], exact_below=0)
        >>> model.config.favor["statistics"]
        'calibrated'
    """
    config = FavorConfig.from_dict({**model_options(model.config).to_dict(), **options})
    name, arguments = feature_family(attn_implementation, config)
    if not feature_weights:
        if refine_steps is not None:
            raise ValueError("refine_steps belongs to feature_weights=True.")
        fit_to_data(model, dataloader, name, arguments, True, max_batches)
    else:
        family = _weighted_family(name, arguments, config, refine_steps)
        steps = (REFINE_STEPS if family.learns_matrices else 0) if refine_steps is None else refine_steps
        samples, modules = Samples(config.window), attention_modules(model)
        drop_own(model, modules, options)  # before the weights are learned for what is exact
        statistics = Statistics(family)
        observe_batches(model, dataloader, (statistics, samples), max_batches)
        fits, keys, device = {}, {}, next(model.parameters()).device
        for number, parameters in statistics.parameters().items():
            own = stored_choice(modules[number])
            place = {"exact_heads": own.get("exact_heads", ()), "device": device}
            fits[number] = fit_weights(family, parameters, samples.layers[number], config, number, steps, **place)
            keys[number] = weights_of(own, config.window, config, number)
        store_parameters(model, fits, name, weights=keys)
    return configure(model, attn_implementation, **{**options, "statistics": "calibrated"})


def _weighted_family(
    name: str, arguments: Mapping[str, Any], config: FavorConfig, refine_steps: int | None
) -> PositiveFeatures:
    """Makes the family whose features get weights, after all that forbids them is ruled out."""
    family = _family(name, arguments)
    if not family.takes_parameters:
        raise ValueError(f"{name} features take no weights, as positive ones do; use favor+, favor++ or favor#.")
    if config.redraw_interval:
        interval = f"redraw_interval={config.redraw_interval}"
        raise ValueError(f"weights belong to their directions, which {interval} would change; set redraw_interval=0.")
    allowed = refine_steps is None or (isinstance(refine_steps, int) and refine_steps >= 0)
    if not allowed or (refine_steps and not family.learns_matrices):
        known = " and ".join(sorted(one.name for one in families.REGISTRY.values() if one.learns_matrices))
        raise ValueError(f"refine_steps must be 0 for {name} features, at least 0 for {known}; got {refine_steps!r}.")
    return family


def _family(name: str, arguments: Mapping[str, Any]) -> Any:
    return families.get(name, **arguments, **families.REGISTRY[name].pooled_options)


def fit_to_data(
    model: PreTrainedModel,
    dataloader: Iterable[Any],
    name: str,
    arguments: Mapping[str, Any],
    store: bool,
    max_batches: int | None,
) -> Statistics:
    """Gathers the statistics of a family, by name and options; with `store`, puts its parameters into the model."""
    family = _family(name, arguments)
    if not family.needs_statistics:
        raise ValueError(f"{name} features have no parameters to fit; use favor#, favor++, or feature_weights=True.")
    statistics = Statistics(family)
    observe_batches(model, dataloader, (statistics,), max_batches)
    if store:
        store_parameters(model, statistics.parameters(), name)
    return statistics
