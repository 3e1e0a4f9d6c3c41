"""Operations of attention, counted, and budgets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from favor.registry import Family


@dataclass
class Costs:
    """Operations of one head over a sequence, forward.

    The search for selected keys, and the statistics of families that take some, are not counted.

    Attributes:
        length: tokens L.
        num_features: M of the layers that choose none.
        window: window of the layers that choose none, 0 for none.
        head_dim: d of each layer.
        per_feature: operations of the family per token, feature and number of a head.
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
        """Raises a ValueError if a budget does not pay for the cheapest choice.

        Args:
            budget: fraction of the operations of exact attention.
            least, whole: operations of the cheapest choice, and of exact attention in all layers.
        """
        if least > budget * whole:
            raise ValueError(
                f"flop_budget={budget} is less than the estimate alone costs at {self.length} tokens, "
                f"{least / whole:.2f} times the cost of exact attention. Raise it, or take fewer features, a shorter "
                "window or longer sequences."
            )
