"""Means and selected keys of each layer, chosen by measured errors under a budget of operations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from favor.attention import favor_attention
from favor.config import FavorConfig
from favor.integrations.adapt.costs import Costs
from favor.integrations.adapt.observe import Observation, observe_batches, relative_error
from favor.integrations.layer import decodes
from favor.landmark.causal import SECTION
from favor.registry import Family


class Setting(NamedTuple):
    """Options of a layer; the names are those of `FavorConfig`."""

    num_features: int
    selected_keys: int


# What is tried for the options that are not fixed.
VALUES = {"num_features": (64, 128, 256), "selected_keys": (0, 128, 256, 512, 1024)}


class LayerErrors:
    """Measures the relative error of every setting in every layer, as a callback of `observe_batches`.

    Attributes:
        family: of the attention that is measured.
        config: its other options.
        settings: what is tried.
        errors: by layer and setting, the sum over heads for each sequence. The setting None is exact attention; causal
            layers do not have it, since no state holds it.
        heads: by layer, the numbers of query heads and of key heads.
        head_dim: by layer.
        blocks: by layer, the tokens that see each other exactly; 0 in layers of encoders.
        longest: number of keys of the longest sequence.
    """

    def __init__(self, family: Family, config: FavorConfig, settings: Sequence[Setting]) -> None:
        self.family, self.config, self.settings = family, config, settings
        self.errors: dict[int, dict[Setting | None, list[float]]] = {}
        self.heads: dict[int, tuple[int, int]] = {}
        self.head_dim: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self.longest = 0

    def __call__(self, seen: Observation) -> None:
        """Adds the errors of one call of a layer."""
        errors = self.errors.setdefault(seen.layer, {} if seen.is_causal else {None: [0.0]})
        self.heads[seen.layer], self.head_dim[seen.layer] = (seen.query.shape[1], seen.key.shape[1]), seen.key.shape[3]
        self.blocks[seen.layer] = SECTION if seen.is_causal else 0
        self.longest = max(self.longest, seen.key.shape[2])
        settings = self.settings
        if seen.is_causal:  # such a layer does not read the number of means
            number = settings[0].num_features
            settings = list(dict.fromkeys(setting._replace(num_features=number) for setting in settings))
        for setting in settings:
            out = favor_attention(
                seen.query,
                seen.key,
                seen.value,
                features=self.family,
                key_padding_mask=seen.padding,
                is_causal=seen.is_causal,
                scale=seen.scale,
                use_statistics=not decodes(seen.module),
                kernel=self.config.kernel,
                **setting._asdict(),
            )
            errors.setdefault(setting, []).extend(relative_error(out, seen).sum(1).tolist())

    def means(self) -> dict[int, dict[Setting | None, float]]:
        """Gives the mean error over sequences, summed over the heads, by layer and setting."""
        return {
            layer: {setting: sum(rows) / len(rows) for setting, rows in own.items()}
            for layer, own in sorted(self.errors.items())
        }


def choose_landmarks(
    model: PreTrainedModel,
    dataloader: Iterable[Any],
    family: Family,
    config: FavorConfig,
    fixed: Collection[str],
    *,
    budget: float,
    length: int | None,
    max_batches: int | None,
) -> dict[int, dict[str, Any]]:
    """Measures every setting in every layer and chooses one for each, for `config.favor_layers`.

    Args:
        model, dataloader, length, max_batches: as for `favor.convert`.
        family: that selects keys.
        config: options.
        fixed: names of options whose values all layers share.
        budget: fraction of the operations of exact attention in all layers.

    Returns:
        an entry for every layer.

    Raises:
        ValueError: if the cheapest settings cost more than the budget, or no layer ran.
    """
    values = [(getattr(config, name),) if name in fixed else VALUES[name] for name in Setting._fields]
    measured = LayerErrors(family, config, [Setting(*each) for each in product(*values)])
    observe_batches(model, dataloader, measured, max_batches)
    costs = Costs(length or measured.longest, 0, 0, measured.head_dim, family.operations)
    operations = {
        layer: {each: _cost(costs, layer, each, measured.blocks[layer]) * measured.heads[layer][0] for each in own}
        for layer, own in measured.errors.items()
    }
    whole = sum(costs.exact(layer) * heads for layer, (heads, _) in measured.heads.items())
    costs.check(budget, sum(min(own.values()) for own in operations.values()), whole)
    entries: dict[int, dict[str, Any]] = {}
    for layer, setting in cheapest_error(measured.means(), operations, budget * whole).items():
        key_heads = measured.heads[layer][1]
        if setting is None:
            entries[layer] = {"exact_heads": list(range(key_heads)), "key_heads": key_heads}
        else:
            entries[layer] = {name: value for name, value in setting._asdict().items() if name not in fixed}
    return entries


def _cost(costs: Costs, layer: int, setting: Setting | None, block: int) -> int:
    if setting is None:
        return costs.exact(layer)
    return costs.linear(layer, block, 0 if block else setting.num_features, setting.selected_keys)


def cheapest_error(
    errors: Mapping[int, Mapping[Setting | None, float]],
    operations: Mapping[int, Mapping[Setting | None, int]],
    limit: float,
) -> dict[int, Setting | None]:
    """Chooses a setting for each layer, so that the sum of errors is the smallest that a number of operations allows.

    Layer by layer, the sums that no cheaper sum beats are kept: with them the choice is exact.

    Args:
        errors: by layer and setting.
        operations: by layer and setting, whole numbers, so that equal sums are equal.
        limit: greatest sum of operations; it must allow the cheapest settings.
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
