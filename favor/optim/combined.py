"""Several optimizers as one, for programs that take one: accelerate with GradScaler, transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from favor.optim.head import Closure


class CombinedOptimizer(Optimizer):
    """Steps several optimizers, each on parameters of its own, in turn.

    Its parameter groups are those of the optimizers, in order, so that a learning rate scheduler or
    `GradScaler.unscale_` sees all of them. GradScaler and accelerate update the loss scale after each optimizer that
    steps, so with two separate optimizers the gradients of the second would be unscaled by another number: combine
    them.

    Args:
        optimizers: at least one, all with different parameters.

    Raises:
        ValueError: without optimizers, or if two share a parameter.

    Example:
        >>> import torch
        >>> from favor.optim import CombinedOptimizer, SoftmaxBound
        >>> body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        >>> optimizer = CombinedOptimizer(torch.optim.AdamW(body.parameters()), SoftmaxBound(head))
        >>> len(optimizer.param_groups)
        2
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("CombinedOptimizer needs at least one optimizer.")
        self.optimizers, self._complete = optimizers, False
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if len({id(p) for p in parameters}) < len(parameters):
            raise ValueError(
                "two of the optimizers hold the same parameter: leave the head out of the body's optimizer."
            )
        super().__init__(parameters, {})
        self._share_groups()
        self._complete = True

    def _share_groups(self) -> None:
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Steps all optimizers; a closure is called once, before them. Returns what it returned, else None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at construction only: afterwards give groups to the optimizers before you combine them."""
        if self._complete:
            raise TypeError("add the group to one of the combined optimizers before they are combined.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Gives `{"optimizers": [one state dict each]}`."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            ValueError: if it is of another number of optimizers.
        """
        states = state_dict.get("optimizers", [])
        if len(states) != len(self.optimizers):
            raise ValueError(f"state_dict holds {len(states)} optimizers, expected {len(self.optimizers)}.")
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()
