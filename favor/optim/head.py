"""Base of the optimizers of a softmax output layer: inputs by a hook, gradients, groups, state and processes."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from favor.optim.bound import ORDERS

Closure = Callable[[], Any]
Options = dict[str, Any]
Heads = nn.Linear | Iterable[Options]


@dataclass(frozen=True)
class Batch:
    """All inputs `[N, d]` of a step that the loss depends on, and their weights, positive, sum 1 for a mean loss.

    They are in float32 or float64, with a column of ones if the layer has a bias to train; N may be 0.
    """

    x: Tensor
    weights: Tensor


class RowStore(list[tuple[Tensor, Tensor]]):
    """Pairs of inputs `[N, d]` and, for each of them, a weight or whether the loss depends on it, `[N]`."""

    __slots__ = ("__weakref__",)


class Capture:
    """Forward hook that keeps inputs once a gradient has come back for them.

    It waits for the gradient of the output and not for the forward pass: an output that is never differentiated leaves
    nothing behind, a pass that checkpointing repeats counts once, and a row of zeros tells that the loss leaves this
    input out.

    The store belongs to the optimizer. Without it, in a copy of the module or when the optimizer is gone, the hook does
    nothing.
    """

    def __init__(self, store: RowStore | None = None) -> None:
        self._store = None if store is None else weakref.ref(store)

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """Keeps the inputs; the module calls this after its forward pass."""
        store = None if self._store is None else self._store()
        if store is None or not output.requires_grad:
            return
        x = (args[0] if args else kwargs["input"]).detach()

        def keep(gradient: Tensor) -> None:
            counted = gradient.detach().reshape(-1, gradient.shape[-1]).any(-1)
            store.append((x.reshape(-1, x.shape[-1]), counted))

        output.register_hook(keep)

    def __reduce__(self) -> tuple[type[Capture], tuple[()]]:
        return Capture, ()


class HeadOptimizer(Optimizer):
    """Base of the optimizers of an output layer `nn.Linear` `[n, d]`, n >= 2, under a softmax.

    A hook on the head keeps those of its inputs that the loss depends on, when their gradient comes back; `step` takes
    the gradient from `.grad` and drops the inputs; `zero_grad` drops them too. The loss has to be a mean over these
    rows with equal weights; for other losses pass inputs and weights to `set_batch`. Statistics are averaged over the
    process group as DDP averages gradients. Options that do not fit raise a TypeError or ValueError, and so does a head
    that is frozen or whose weight another module holds too (tied embeddings).
    """

    def __init__(
        self, head: Heads, defaults: Options, process_group: dist.ProcessGroup | None = None, capture: bool = True
    ) -> None:
        self._heads: list[nn.Linear] = []
        self._captured: list[RowStore] = []
        self._given: list[RowStore] = []
        self._process_group = process_group
        self._capture = capture
        groups = [{"head": head}] if isinstance(head, nn.Module) else list(head)
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a head: `{"head": nn.Linear, ...}` with options of its own."""
        name = type(self).__name__
        group = dict(param_group) if isinstance(param_group, dict) else {"head": param_group}
        head = group.pop("head", None)
        if not isinstance(head, nn.Linear) or not isinstance(param_group, dict):
            raise TypeError(
                f'{name} takes an nn.Linear as head, or dicts {{"head": nn.Linear}}; got {type(head).__name__}.'
            )
        if unknown := set(group) - set(self.defaults):
            raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}; it has {', '.join(self.defaults)}.")
        if head.out_features < 2 or not all(parameter.requires_grad for parameter in head.parameters()):
            frozen = [key for key, parameter in head.named_parameters() if not parameter.requires_grad]
            raise ValueError(
                f"{name} needs a head with at least 2 outputs and nothing frozen, got {head.out_features} outputs and "
                f"{', '.join(frozen) or 'nothing'} frozen."
            )
        if others := [type(module).__name__ for module in other_holders(head)]:
            raise ValueError(
                f"the head's weight is also held by {', '.join(others)}: the bound covers the softmax alone. Untie "
                "them (tie_word_embeddings=False) or leave the head to another optimizer."
            )
        group["params"] = [parameter for parameter in (head.weight, head.bias) if parameter is not None]
        self._check({**self.defaults, **group})
        super().add_param_group(group)
        self._heads.append(head)
        self._captured.append(RowStore())
        self._given.append(RowStore())
        if self._capture:
            hook = head.register_forward_hook(Capture(self._captured[-1]), with_kwargs=True)
            weakref.finalize(self, hook.remove)

    def _check(self, options: Options) -> None:
        for name in ("lr", "weight_decay", "damping"):
            if name in options and not 0 <= options[name] < float("inf"):
                raise ValueError(f"{name} must be a number from 0, got {options[name]}.")
        if options.get("order") not in (None, *ORDERS):
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {options['order']!r}.")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} refers to a module and cannot be copied or pickled: use state_dict().")

    def set_batch(self, x: Tensor, weight: Tensor | None = None, *, head: nn.Linear | None = None) -> None:
        """Gives inputs of the next step by hand, in place of those that the hook keeps; several calls add up.

        It is for losses that never call the head (fused linear cross-entropy) or are not a mean over its rows.

        Args:
            x: inputs `[..., d]`.
            weight: weight of each row in the loss, `[...]`: 1/N for each in a mean of N, 0 for rows left out. Integers
                or booleans share a total of 1. Default: 1/N.
            head: which head; needed if there are several.

        Raises:
            ValueError: for shapes that do not fit, negative weights, or a head that this optimizer does not have.
        """
        if head is None and len(self._heads) == 1:
            head = self._heads[0]
        index = next((i for i, known in enumerate(self._heads) if known is head), None)
        if index is None:
            raise ValueError(f"head must be one of the {len(self._heads)} of this optimizer.")
        width = self._heads[index].in_features
        if x.ndim == 0 or x.shape[-1] != width or (weight is not None and weight.shape != x.shape[:-1]):
            got = f"{tuple(x.shape)} and {None if weight is None else tuple(weight.shape)}"
            raise ValueError(f"x must be [..., {width}] and weight [...], got {got}.")
        rows = x.detach().reshape(-1, width)
        if weight is None:
            flat = rows.new_full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float32)
        else:
            flat = weight.detach().reshape(-1)
            flat = flat if flat.is_floating_point() else flat.float() / flat.count_nonzero().clamp_min(1)
            if not bool((flat >= 0).all()):
                raise ValueError("weight must not be negative or NaN.")
        self._given[index].append((rows, flat))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and the inputs that belong to them."""
        super().zero_grad(set_to_none)
        self._drop_rows()

    def _drop_rows(self) -> None:
        for rows in (*self._captured, *self._given):
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
        """Takes one step for every head with a gradient.

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
        for index, (group, head) in enumerate(zip(self.param_groups, self._heads, strict=True)):
            if head.weight.grad is not None:
                with torch.autocast(head.weight.device.type, enabled=False):
                    self._step_head(group, head, self._given[index] or self._captured[index])
        self._drop_rows()
        return loss

    def _step_head(self, group: Options, head: nn.Linear, rows: RowStore) -> None:
        like = torch.zeros((), dtype=precision(head), device=head.weight.device)
        batch = collect(rows, head.in_features, len(group["params"]) > 1, like)
        gradients = [whole(parameter.grad) for parameter in group["params"] if parameter.grad is not None]
        # One pass without a copy, and NaN stays NaN.
        extremes = [torch.stack(torch.aminmax(part)).to(like) for part in (*gradients, batch.x) if part.numel()]
        finite = torch.stack(extremes).isfinite().all().to(like)
        largest = torch.stack(extremes[: len(gradients)]).abs().amax()
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
        elif largest > 0:
            raise RuntimeError(
                "the head has a gradient, but none of its inputs were seen: call it as a module after the optimizer is "
                "made, or give its inputs with set_batch(x, weight)."
            )

    def _update(self, group: Options, head: nn.Linear, batch: Batch) -> None:
        theta, gradient = (joined(head, parts) for parts in (group["params"], [p.grad for p in group["params"]]))
        self._move(group, self._direction(group, self.state[head.weight], theta, gradient, batch))

    def _move(self, group: Options, change: Tensor) -> None:
        subtract(group["params"], change)

    def _direction(self, group: Options, state: Options, theta: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        """Gives the step that `_move` subtracts from theta `[n, d]`, for the loss gradient without weight decay."""
        raise NotImplementedError

    def _world_size(self) -> int:
        initialized = dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self._process_group) if initialized else 1

    def _mean(self, value: Tensor) -> Tensor:
        """Averages over processes, in place."""
        if self._world_size() > 1:
            dist.all_reduce(value, group=self._process_group)
            value /= self._world_size()
        return value


def collect(store: RowStore, width: int, with_ones: bool, like: Tensor) -> Batch:
    """Empties the store into one batch of rows `[N, width]`, with a column of ones if asked, in the type of `like`.

    Float weights are not changed; if rows only count or do not count, those that count share a total of 1.
    """
    parts = [(x[part != 0], part[part != 0]) for x, part in store]
    store.clear()
    x = torch.cat([like.new_zeros(0, width), *(rows.to(like) for rows, _ in parts)])
    weights = torch.cat([like.new_zeros(0), *(part.to(like) for _, part in parts)])
    if parts and not parts[0][1].is_floating_point():
        weights = weights / max(1, len(weights))
    if with_ones:
        x = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
    return Batch(x, weights)


def other_holders(head: nn.Linear) -> list[nn.Module]:
    """Lists the modules, of all that exist, that hold the weight of a head too."""
    others = [own for own in gc.get_referrers(head.weight) if isinstance(own, dict) and own is not head._parameters]
    if not others:  # to look at each object takes seconds where there are millions
        return []
    modules = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and thing is not head)
    return [own for own in modules if any(part is head.weight for part in own.__dict__.get("_parameters", {}).values())]


def precision(head: nn.Linear) -> torch.dtype:
    """Gives the type in which the step of a head is computed: float64 for float64, else float32."""
    return torch.float64 if head.weight.dtype == torch.float64 else torch.float32


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor that FSDP has shared out to processes; others stay as they are."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def joined(head: nn.Linear, parts: list[Any]) -> Tensor:
    """Joins weight and bias, or their gradients, to `[n, d]` in at least float32; a missing gradient is zero."""
    parts = [None if part is None else whole(part.detach()) for part in parts]
    weight = parts[0].to(precision(head))
    if len(parts) == 1:
        return weight
    bias = weight.new_zeros(len(weight)) if parts[1] is None else parts[1].to(weight)
    return torch.cat((weight, bias.unsqueeze(-1)), dim=1)


def subtract(parameters: list[Any], change: Tensor) -> None:
    """Subtracts from weight, and bias if there is one, the columns of `[n, d]`; in the precision of the change."""
    for parameter, part in zip(parameters, (change[:, : parameters[0].shape[1]], change[:, -1]), strict=False):
        if hasattr(parameter, "full_tensor"):  # every process has the change, and takes its part of it
            from torch.distributed.tensor import distribute_tensor

            part = distribute_tensor(part, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(parameter.to(change.dtype) - part) if parameter.dtype != change.dtype else parameter.sub_(part)
