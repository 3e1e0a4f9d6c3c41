"""Turning a pretrained model into one with linear attention: backend, parameters, and which heads stay exact."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from favor.config import FavorConfig, feature_family
from favor.features import REGISTRY, get
from favor.integrations.adapt.calibrate import fit_to_data
from favor.integrations.adapt.costs import Costs
from favor.integrations.adapt.landmark_choice import choose_landmarks
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
        model: any transformers model that the backends accept, or a part that is itself a model, such as the encoder of
            a Whisper; then no other part changes.
        attn_implementation: a FAVOR backend, default "favor#".
        dataloader: batches as for `favor.calibrate`. Needed for `layers="auto"` and for `statistics="calibrated"`.
        layers: "all" (default), or "auto", which chooses layer by layer under the budget. For random features, heads
            whose diagnostic rho says that M features cannot estimate them (rho > log M, see
            `favor.features.Parameters.rho`) keep exact attention, worst first, as far as the budget allows; layers with
            such heads that must still be estimated take wider windows, as far as the rest of the budget allows. For
            landmarks, each layer takes the `num_features` and `selected_keys` with which the error of all
            heads, measured on the data, is smallest; layers of encoders may stay exact. Options that are named in the
            call are not chosen: all layers share their values.
        flop_budget: for "auto", operations of all attention layers as a fraction of those of exact attention. The
            search for selected keys is not counted.
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
        >>> data = [torch.arange(400).view(2, 200)]
        >>> model = favor.convert(BertModel(tiny), "landmark", dataloader=data, layers="auto", flop_budget=0.6)
        >>> sorted(model.config.favor_layers["encoder.layer.0.attention.self"])
        ['num_features', 'selected_keys']

        Random features, with parameters that are stored in the model:

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
    name, arguments = feature_family(attn_implementation, config, options)
    entries: dict[int, dict[str, Any]] = {}
    if layers == "auto" and REGISTRY[name].selects_keys:
        fixed = [option for option, value in options.items() if value is not None]
        entries = choose_landmarks(
            model, dataloader, get(name), config, fixed, budget=flop_budget, length=length, max_batches=max_batches
        )
        clear_choices(model)
        configure(model, attn_implementation, **options)
        update_choices(model, entries)
        return model
    if not REGISTRY[name].takes_parameters:
        raise ValueError(
            f'layers="auto" needs the variance of positive features, or landmarks, and {name} has neither; use "all".'
        )
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
        entries = allocate(rho, costs, flop_budget)
    configure(model, attn_implementation, **options)
    update_choices(model, entries)
    return model


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
    whole = sum(costs.exact(layer) * len(own) for layer, own in rho.items())
    limit, spent = budget * whole, sum(costs.linear(layer, costs.window) * len(own) for layer, own in rho.items())
    costs.check(budget, spent, whole)
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
    # The number of heads tells a layer whose heads are all exact, which needs no parameters.
    return {
        layer: {"exact_heads": sorted(exact[layer]), "key_heads": len(heads), **own.get(layer, {})}
        for layer, heads in rho.items()
    }
