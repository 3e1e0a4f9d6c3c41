"""Turning a pretrained model into one with linear attention: backend, parameters, and which heads stay exact."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from favor.attention import favor_attention
from favor.config import FavorConfig, feature_family
from favor.features import REGISTRY, get
from favor.integrations.adapt.calibrate import fit_to_data
from favor.integrations.adapt.observe import Observation, observe_batches, relative_error
from favor.integrations.backend import model_options
from favor.integrations.configure import configure
from favor.integrations.layer import decodes, decodes_or_is_causal
from favor.integrations.stored import clear_choices, update_choices
from favor.landmark.causal import SECTION
from favor.registry import Family

WIDENINGS = (2, 4)  # windows that a layer may take instead of the common one, as multiples
NARROWEST = 64
# What is tried for the options of landmarks that are not fixed.
VALUES = {"num_features": (64, 128, 256), "selected_keys": (0, 128, 256, 512, 1024)}


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
    entries: dict[int, dict[str, Any]] = {}
    if layers == "auto" or config.statistics == "calibrated":
        if dataloader is None:
            raise ValueError('layers="auto" and statistics="calibrated" need data: pass a dataloader.')
        name, arguments = feature_family(attn_implementation, config, options)
        selects = layers == "auto" and REGISTRY[name].selects_keys
        if not selects and not REGISTRY[name].takes_parameters:
            raise ValueError(f'layers="auto" needs positive features or landmarks, and {name} has neither; use "all".')
        causal = any(map(decodes_or_is_causal, model.modules()))
        if layers == "auto" and not selects and config.statistics == "batch" and causal:
            raise ValueError('layers="auto" of a decoder needs statistics="calibrated": causal layers fit none.')
        if selects:
            measured = LayerErrors(get(name), config, [option for option, own in options.items() if own is not None])
            observe_batches(model, dataloader, (measured,), max_batches)
            entries = measured.choices(flop_budget, length)
        else:
            statistics = fit_to_data(model, dataloader, name, arguments, config.statistics == "calibrated", max_batches)
            head_dim = {number: own.head_dim for number, (own, _) in statistics.layers.items()}
            costs = Costs(length or statistics.longest, config.num_features, config.window, head_dim)
            entries = allocate(statistics.rho(), costs, flop_budget) if layers == "auto" else {}
    clear_choices(model)
    configure(model, attn_implementation, **options)
    update_choices(model, entries)
    return model


@dataclass
class Costs:
    """Operations of one head over L tokens, forward, without the search for selected keys and without statistics.

    M and the window are those of the layers that choose none; `per_feature` is per token, feature and number of a head.
    """

    length: int
    num_features: int
    window: int
    head_dim: Mapping[int, int]
    per_feature: int = Family.operations

    def exact(self, layer: int) -> int:
        """Counts 4 L^2 d operations."""
        return 4 * self.length**2 * self.head_dim[layer]

    def linear(self, layer: int, window: int, num_features: int | None = None, selected_keys: int = 0) -> int:
        """Counts 8 L M d operations for features (4 for means), and 4 L d for each key of a block or selected."""
        number = self.num_features if num_features is None else num_features
        exact_keys = min(window, self.length) + min(selected_keys, self.length)
        return self.length * self.head_dim[layer] * (self.per_feature * number + 4 * exact_keys)

    def check(self, budget: float, least: float, whole: float) -> None:
        """Raises a ValueError if a fraction of `whole`, the cost of exact attention, is below the `least` choice."""
        if least > budget * whole:
            raise ValueError(
                f"flop_budget={budget} is less than the estimate alone costs at {self.length} tokens, "
                f"{least / whole:.2f} times the cost of exact attention. Raise it, or take fewer features, a shorter "
                "window or longer sequences."
            )


def allocate(rho: Mapping[int, Tensor], costs: Costs, budget: float) -> dict[int, dict[str, Any]]:
    """Chooses the heads that stay exact, and wider windows: an entry of `config.favor_layers` for every layer.

    By the diagnostic rho of every layer and key head, `[Hk]`; the budget is a fraction of the operations of exact
    attention in all heads.
    """
    whole = sum(costs.exact(layer) * len(own) for layer, own in rho.items())
    limit, spent = budget * whole, sum(costs.linear(layer, costs.window) * len(own) for layer, own in rho.items())
    costs.check(budget, spent, whole)
    exact: dict[int, list[int]] = {layer: [] for layer in rho}
    heads = ((value, layer, head) for layer, own in rho.items() for head, value in enumerate(own.tolist()))
    left = []
    for value, layer, head in sorted(heads, reverse=True):  # the worst first
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


class Setting(NamedTuple):
    """Options of a layer of landmarks; the names are those of `FavorConfig`."""

    num_features: int
    selected_keys: int


class _Shape(NamedTuple):
    """Sizes of a layer; `block` is how many tokens see each other exactly, 0 in layers of encoders."""

    heads: int
    key_heads: int
    head_dim: int
    block: int


class LayerErrors:
    """Measures the relative error of landmarks in every layer, as a callback of `observe_batches`, and chooses by it.

    Options that are `fixed` have the values of the config in all layers. `errors` holds, by layer and setting, the sum
    over heads for each sequence. The setting None is exact attention; causal layers do not have it, since no state
    holds it.
    """

    def __init__(self, family: Family, config: FavorConfig, fixed: Collection[str]) -> None:
        self.family, self.config, self.fixed, self.longest = family, config, fixed, 0
        values = [(getattr(config, name),) if name in fixed else VALUES[name] for name in Setting._fields]
        self.settings = [Setting(*each) for each in product(*values)]
        self.errors: dict[int, dict[Setting | None, list[float]]] = {}
        self.shapes: dict[int, _Shape] = {}

    def __call__(self, seen: Observation) -> None:
        """Adds the errors of one call of a layer."""
        errors = self.errors.setdefault(seen.layer, {} if seen.is_causal else {None: [0.0]})
        sizes = (seen.query.shape[1], seen.key.shape[1], seen.key.shape[3])
        self.shapes[seen.layer] = _Shape(*sizes, SECTION if seen.is_causal else 0)
        self.longest = max(self.longest, seen.key.shape[2])
        settings: Sequence[Setting] = self.settings
        if seen.is_causal:  # such a layer does not read the number of means
            number = settings[0].num_features
            settings = list(dict.fromkeys(setting._replace(num_features=number) for setting in settings))
        options: Any = {"features": self.family, "kernel": self.config.kernel, "scale": seen.scale}
        options |= {"relative": seen.relative, "key_padding_mask": seen.padding, "is_causal": seen.is_causal}
        options["use_statistics"] = not decodes(seen.module)
        for setting in settings:
            out = favor_attention(seen.query, seen.key, seen.value, **options, **setting._asdict())
            errors.setdefault(setting, []).extend(relative_error(out, seen).sum(1).tolist())

    def means(self) -> dict[int, dict[Setting | None, float]]:
        """Gives the mean error over sequences, summed over the heads, by layer and setting."""
        return {
            layer: {setting: sum(rows) / len(rows) for setting, rows in own.items()}
            for layer, own in sorted(self.errors.items())
        }

    def choices(self, budget: float, length: int | None) -> dict[int, dict[str, Any]]:
        """Chooses a setting for each layer: an entry of `config.favor_layers` for every layer.

        The budget is a fraction of the operations of exact attention in all layers, counted at a length; None for that
        of the longest sequence.
        """
        means, dims = self.means(), {layer: shape.head_dim for layer, shape in self.shapes.items()}
        costs = Costs(length or self.longest, 0, 0, dims, self.family.operations)

        def operations(layer: int, setting: Setting | None) -> int:
            heads, block = self.shapes[layer].heads, self.shapes[layer].block
            if setting is None:
                return heads * costs.exact(layer)
            return heads * costs.linear(layer, block, 0 if block else setting.num_features, setting.selected_keys)

        spent = {layer: {setting: operations(layer, setting) for setting in own} for layer, own in means.items()}
        whole = sum(operations(layer, None) for layer in means)
        costs.check(budget, sum(min(own.values()) for own in spent.values()), whole)
        entries: dict[int, dict[str, Any]] = {}
        for layer, setting in cheapest_error(means, spent, budget * whole).items():
            number = self.shapes[layer].key_heads
            entries[layer] = {"exact_heads": list(range(number)), "key_heads": number}
            if setting is not None:
                entries[layer] = {name: value for name, value in setting._asdict().items() if name not in self.fixed}
        return entries


def cheapest_error(
    errors: Mapping[int, Mapping[Setting | None, float]],
    operations: Mapping[int, Mapping[Setting | None, int]],
    limit: float,
) -> dict[int, Setting | None]:
    """Chooses a setting for each layer, so that the sum of errors is the smallest that a number of operations allows.

    Layer by layer, the sums that no cheaper sum beats are kept: with them the choice is exact. Operations are whole
    numbers, so that equal sums are equal.
    """
    front: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for layer, own in errors.items():
        longer = [
            (spent + operations[layer][setting], error + more, (setting, chosen))
            for spent, error, chosen in front
            for setting, more in own.items()
        ]
        front = []
        for state in sorted(longer, key=lambda state: state[:2]):
            if state[0] <= limit and (not front or state[1] < front[-1][1]):
                front.append(state)
    chosen, choice = front[-1][2], {}
    for layer in reversed(list(errors)):
        choice[layer], chosen = chosen
    return choice
