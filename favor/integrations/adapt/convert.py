"""Turning a pretrained model into one with linear attention: backend, parameters, and which heads stay exact."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from favor.config import FavorConfig, feature_family
from favor.features import REGISTRY
from favor.integrations.adapt.calibrate import fit_to_data
from favor.integrations.backend import model_options
from favor.integrations.configure import configure
from favor.integrations.layer import decodes_or_is_causal
from favor.integrations.stored import clear_choices, update_choices

WIDENINGS = (2, 4)  # windows that a layer may take instead of the common one, as multiples
NARROWEST = 64


def convert(
    model: PreTrainedModel,
    attn_implementation: str = "favor#",
    *,
    dataloader: Iterable[Any] | None = None,
    layers: str = "all",
    flop_budget: float = 0.5,
    length: int | None = None,
    max_batches: int | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Switches a pretrained model to a FAVOR backend, in all heads or where the estimate is good.

    Args:
        model: any transformers model that the backends accept.
        attn_implementation: a FAVOR backend, default "favor#".
        dataloader: batches as for `favor.calibrate`. Needed for `layers="auto"` and for `statistics="calibrated"`.
        layers: "all" (default), or "auto": heads whose diagnostic rho says that M features cannot estimate them
            (rho > log M, see `favor.features.Parameters.rho`) keep exact attention, worst first, as far as the budget
            allows; layers with such heads that must still be estimated take wider windows, as far as the rest of the
            budget allows.
        flop_budget: for "auto", operations of all attention layers as a fraction of those of exact attention.
        length: for "auto", number of tokens at which operations are counted; default: the length of the longest
            sequence in the data.
        max_batches: number of batches of data after which to stop; None (default) takes all.
        **options: fields of `FavorConfig`, as in `favor.configure`.

    Returns:
        The model. `save_pretrained` writes all choices and the name of the backend, and `from_pretrained` uses them
        again if `favor` is imported.

    Raises:
        ValueError: for a bad option, or a budget below the cost of estimating every head.

    Example:
        >>> import torch, favor
        >>> from transformers import BertConfig, BertModel
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> data = [torch.arange(12).view(2, 6)]
        >>> model = favor.convert(BertModel(tiny), "favor#", dataloader=data, statistics="calibrated", exact_below=0)
        >>> model.config.favor["statistics"]
        'calibrated'
    """
    if layers not in ("all", "auto"):
        raise ValueError(f'layers must be "all" or "auto", got {layers!r}.')
    config = FavorConfig.from_dict({**model_options(model.config).to_dict(), **options})
    if config.statistics == "corrected":
        raise ValueError('only favor.train.distill makes statistics="corrected"; convert with "batch" or "calibrated".')
    if layers == "all" and config.statistics == "batch":
        clear_choices(model)
        return configure(model, attn_implementation, **options)
    if dataloader is None:
        raise ValueError('layers="auto" and statistics="calibrated" need data: pass a dataloader.')
    name, arguments = feature_family(attn_implementation, config)
    if not REGISTRY[name].takes_parameters:
        raise ValueError(f'layers="auto" needs the variance of positive features, and {name} has none; use "all".')
    if layers == "auto" and config.statistics == "batch" and any(map(decodes_or_is_causal, model.modules())):
        raise ValueError(
            'layers="auto" of a decoder needs statistics="calibrated": causal layers fit no parameters themselves.'
        )
    clear_choices(model)
    statistics = fit_to_data(model, dataloader, name, arguments, config.statistics == "calibrated", max_batches)
    if layers == "auto":
        rho = statistics.rho()
        head_dim = {number: own.head_dim for number, (own, _) in statistics.layers.items()}
        costs = Costs(length or statistics.longest, config.num_features, config.window, head_dim)
        update_choices(model, allocate(rho, costs, flop_budget))
    return configure(model, attn_implementation, **options)


@dataclass
class Costs:
    """Operations of one head over a sequence, forward.

    Attributes:
        length: tokens L.
        num_features: M.
        window: window of the layers that choose none, 0 for none.
        head_dim: d of each layer.
    """

    length: int
    num_features: int
    window: int
    head_dim: Mapping[int, int]

    def exact(self, layer: int) -> float:
        """Counts 4 L^2 d operations."""
        return 4.0 * self.length**2 * self.head_dim[layer]

    def linear(self, layer: int, window: int) -> float:
        """Counts 8 L M d operations for the features and 4 L window d inside the blocks."""
        return 4.0 * self.length * self.head_dim[layer] * (2 * self.num_features + min(window, self.length))


def allocate(rho: Mapping[int, Tensor], costs: Costs, budget: float) -> dict[int, dict[str, Any]]:
    """Chooses the heads that stay exact, and wider windows, for `config.favor_layers`.

    Args:
        rho: diagnostic of every layer and key head, `[Hk]`.
        costs: of both kinds of attention.
        budget: fraction of the operations of exact attention in all heads.

    Returns:
        an entry for every layer.

    Raises:
        ValueError: if the estimate alone costs more than the budget.
    """
    limit = budget * sum(costs.exact(layer) * len(own) for layer, own in rho.items())
    spent = sum(costs.linear(layer, costs.window) * len(own) for layer, own in rho.items())
    if spent > limit:
        share = budget * spent / limit
        raise ValueError(
            f"flop_budget={budget} is less than the estimate alone costs at {costs.length} tokens, {share:.2f} times "
            "the cost of exact attention. Raise it, or take fewer features, a shorter window or longer sequences."
        )
    exact: dict[int, list[int]] = {layer: [] for layer in rho}
    hopeless = sorted(
        ((value, layer, head) for layer, own in rho.items() for head, value in enumerate(own.tolist())), reverse=True
    )
    left = []
    for value, layer, head in hopeless:
        if value <= math.log(costs.num_features):
            break
        extra = costs.exact(layer) - costs.linear(layer, costs.window)
        if spent + extra <= limit:
            spent += extra
            exact[layer].append(head)
        else:
            left.append(layer)
    windows = dict.fromkeys(rho, costs.window)
    for widening in WIDENINGS:
        for layer in dict.fromkeys(left):
            wider = widening * max(costs.window, NARROWEST)
            estimated = len(rho[layer]) - len(exact[layer])
            extra = (costs.linear(layer, wider) - costs.linear(layer, windows[layer])) * estimated
            if wider < costs.length and spent + extra <= limit:
                spent += extra
                windows[layer] = wider
    # A layer with the common window gets no entry for it, so that a change of the option reaches the layer.
    own = {layer: {"window": window} for layer, window in windows.items() if window != costs.window}
    return {layer: {"exact_heads": sorted(exact[layer]), **own.get(layer, {})} for layer in rho}
