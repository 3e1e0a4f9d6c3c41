"""What the optimizers of a softmax output layer share: inputs by a hook, gradients from `.grad`, groups and state."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

Closure = Callable[[], Any]


@dataclass
class Rows:
    """Inputs of one forward pass `[N, d]`, and which of them the loss depends on (None: not known, so all)."""

    x: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """All inputs of a step, in float32 or float64, with a column of ones if the head has a bias.

    Attributes:
        x: `[N, d]`, d counts the ones.
        weights: `[N]`, sum 1 for a loss that is a mean.
    """

    x: Tensor
    weights: Tensor


class HeadOptimizer(Optimizer):
    """Base of the optimizers of an output layer `nn.Linear` under a softmax.

    A forward pre-hook on the head keeps its inputs, in training mode with gradients on; `step` takes the gradient from
    `.grad` and drops them, `zero_grad` drops them too. The loss has to be a mean over the rows that it depends on. Rows
    with no part in it (`ignore_index`, say) are told by their gradient of zero, if the head's input requires one.

    Args:
        head: `nn.Linear` `[n, d]`, or dicts `{"head": nn.Linear, ...}` with options of their own.
        defaults: options of all groups.
        process_group: of `torch.distributed`, over which statistics are averaged as DDP averages gradients. Default:
            the default group, if there is one.

    Raises:
        TypeError: if a head is not an `nn.Linear`.
        ValueError: for an option out of range, or a head whose weight another module holds too (tied embeddings).
    """

    def __init__(
        self,
        head: nn.Linear | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._heads: list[nn.Linear] = []
        self._rows: list[list[Rows]] = []
        self._process_group = process_group
        groups = [{"head": head}] if isinstance(head, nn.Module) else list(head)
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a head: `{"head": nn.Linear, ...}` with options of its own."""
        group = dict(param_group)
        head = group.pop("head", None)
        if not isinstance(head, nn.Linear):
            raise TypeError(f"{type(self).__name__} takes an nn.Linear as head, got {type(head).__name__}.")
        others = [type(module).__name__ for module in holders(head.weight) if module is not head]
        if others:
            raise ValueError(
                f"the head's weight is also held by {', '.join(others)}: the bound covers the softmax alone. Untie "
                "them (tie_word_embeddings=False) or leave the head to another optimizer."
            )
        group["params"] = [parameter for parameter in (head.weight, head.bias) if parameter is not None]
        self._check({**self.defaults, **group})
        super().add_param_group(group)
        rows: list[Rows] = []
        self._heads.append(head)
        self._rows.append(rows)
        head.register_forward_pre_hook(
            lambda module, args, kwargs: _record(rows, module, args, kwargs), with_kwargs=True
        )

    def _check(self, options: dict[str, Any]) -> None:
        """Raises ValueError for an option out of range."""
        for name, low in (("lr", 0.0), ("weight_decay", 0.0), ("damping", 0.0)):
            if name in options and not low <= options[name] < float("inf"):
                raise ValueError(f"{name} must be a number from {low:g}, got {options[name]}.")

    def set_batch(self, x: Tensor, weight: Tensor | None = None, *, head: nn.Linear | None = None) -> None:
        """Gives the inputs of the next step by hand, in place of those that the hook kept.

        For losses that never call the head (fused linear cross-entropy) or are not a mean over its rows.

        Args:
            x: inputs `[..., d]`.
            weight: part of each row in the loss, `[...]`: 1/N each for a mean of N, 0 for rows left out. Default: 1/N.
            head: which; needed with several.

        Raises:
            ValueError: for shapes that do not fit, or a head that this optimizer does not have.
        """
        if head is None and len(self._heads) == 1:
            head = self._heads[0]
        if head is None or all(head is not known for known in self._heads):
            raise ValueError(f"head must be one of the {len(self._heads)} of this optimizer.")
        if x.shape[-1] != head.in_features or (weight is not None and weight.shape != x.shape[:-1]):
            got = f"{tuple(x.shape)} and {None if weight is None else tuple(weight.shape)}"
            raise ValueError(f"x must be [..., {head.in_features}] and weight [...], got {got}.")
        flat = x.detach().flatten(0, -2)
        weight = flat.new_full((len(flat),), 1 / len(flat), dtype=torch.float32) if weight is None else weight.flatten()
        index = next(i for i, known in enumerate(self._heads) if known is head)
        self._rows[index][:] = [Rows(flat, weight)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and the inputs that belong to them."""
        super().zero_grad(set_to_none)
        for rows in self._rows:
            rows.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state; unlike the base class, it keeps the precision of each tensor, not that of the parameter."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            for name, value in saved.items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step for every head with a gradient.

        Args:
            closure: clears gradients, computes the loss, calls `backward` and returns the loss. Default: none.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: if a head has a gradient but no inputs were seen.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, head, rows in zip(self.param_groups, self._heads, self._rows, strict=True):
            if head.weight.grad is not None:
                self._step_head(group, head, rows)
        for rows in self._rows:
            rows.clear()
        return loss

    def _step_head(self, group: dict[str, Any], head: nn.Linear, rows: list[Rows]) -> None:
        batch = _collect(head, rows, precision(head))
        gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
        # The largest entry, which NaN wins, takes one pass and no memory.
        sizes = [torch.linalg.vector_norm(part, torch.inf).to(batch.x) for part in (*gradients, batch.x)]
        finite = torch.stack(sizes).isfinite().all().to(batch.x)
        finite, total = self._mean(torch.stack((finite, batch.weights.sum()))).tolist()
        if finite < 1:
            warnings.warn(
                f"{type(self).__name__} skipped a step: a gradient or an input of the head is not finite.",
                RuntimeWarning,
                stacklevel=4,
            )
        elif total > 0:
            state = self.state[head.weight]
            state["step"] = state.get("step", 0) + 1
            self._update(group, head, batch)

    def _update(self, group: dict[str, Any], head: nn.Linear, batch: Batch) -> None:
        """Changes the head."""
        theta, gradient = joined(head, group["params"]), joined(head, [p.grad for p in group["params"]])
        write(head, theta - self._direction(group, self.state[head.weight], theta, gradient, batch))

    def _direction(
        self, group: dict[str, Any], state: dict[str, Any], theta: Tensor, gradient: Tensor, batch: Batch
    ) -> Tensor:
        """What `_update` subtracts from theta `[n, d]`, for the gradient of the loss without weight decay."""
        raise NotImplementedError

    def _world_size(self) -> int:
        initialized = dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self._process_group) if initialized else 1

    def _mean(self, value: Tensor) -> Tensor:
        """The mean over processes, in place."""
        if self._world_size() > 1:
            dist.all_reduce(value, group=self._process_group)
            value /= self._world_size()
        return value


def holders(parameter: Tensor) -> list[nn.Module]:
    """Modules that hold a parameter as their own, of all that exist."""
    modules = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [m for m in modules if any(p is parameter for p in m.__dict__.get("_parameters", {}).values())]


def _record(rows: list[Rows], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Keeps the input; passes on a view of it, whose gradient shows which rows count."""
    if not (module.training and torch.is_grad_enabled()):
        return None
    x = args[0] if args else kwargs["input"]
    kept = Rows(x.detach().flatten(0, -2))
    rows.append(kept)
    if not x.requires_grad:
        return None
    seen = x.view_as(x)

    def mark(gradient: Tensor) -> None:
        kept.weight = gradient.detach().flatten(0, -2).ne(0).any(-1)

    seen.register_hook(mark)
    return ((seen, *args[1:]), kwargs) if args else (args, {**kwargs, "input": seen})


def precision(head: nn.Linear) -> torch.dtype:
    """What a head's step is computed in: float64 for float64, else float32."""
    return torch.float64 if head.weight.dtype == torch.float64 else torch.float32


def joined(head: nn.Linear, parts: list[Any]) -> Tensor:
    """Weight and bias, or their gradients, as `[n, d]` in at least float32."""
    weight = parts[0].detach().to(precision(head))
    if head.bias is None:
        return weight
    bias = weight.new_zeros(len(weight)) if parts[1] is None else parts[1].detach().to(weight)
    return torch.cat((weight, bias.unsqueeze(-1)), dim=1)


def write(head: nn.Linear, theta: Tensor) -> None:
    """Sets weight and bias from `[n, d]`."""
    if head.bias is None:
        head.weight.copy_(theta)
    else:
        head.weight.copy_(theta[:, :-1])
        head.bias.copy_(theta[:, -1])


def _collect(head: nn.Linear, rows: list[Rows], dtype: torch.dtype) -> Batch:
    """All rows as one batch; explicit weights are taken as they are, others share a total of 1."""
    if not rows:
        raise RuntimeError(
            "the head has a gradient, but none of its inputs were seen: call it as a module in training mode, or give "
            "its inputs with set_batch(x, weight)."
        )
    x = torch.cat([kept.x for kept in rows]).to(dtype)
    if rows[0].weight is not None and rows[0].weight.is_floating_point():
        weights = rows[0].weight.to(dtype)
    else:
        counted = [torch.ones(len(r.x), device=x.device) if r.weight is None else r.weight.float() for r in rows]
        weights = torch.cat(counted).to(dtype)
        weights = weights / weights.sum().clamp_min(1)
    rows.clear()
    if head.bias is not None:
        x = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
    return Batch(x, weights)
