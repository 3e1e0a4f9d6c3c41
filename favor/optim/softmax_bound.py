"""SoftmaxBound, curvature for the output layer of a deep network, and how to combine it with the body's optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from favor.optim.head import Batch, Closure, HeadOptimizer, Heads, Options
from favor.optim.majorizers import Curvature, Exact, Kronecker, averaged, exact, majorize, second_moment

CURVATURES = ("bohning", "diag", "block", "kfac", "exact", "geometric")
# "geometric" averages over steps before it takes the root, and 512 rows per step were not better (8192 labels).
MAX_ROWS = {"geometric": 64}

# 1 would be best if only the inputs were random. With uncertain labels and a body that changes, 3 was better from the
# second epoch on with batches of 64 and 128, and in every epoch with 16 (Fashion-MNIST, 784-128-128-10).
NOISE = 3.0


class SoftmaxBound(HeadOptimizer):
    r"""Preconditions the gradient of a softmax output layer by an upper bound on its curvature.

    .. math:: W \leftarrow W - \eta\, \frac{m}{m + 3 (d_\delta + 1)}\, (K + (\lambda + \delta) I)^{-1} (G + \lambda W)

    with the gradient G of the loss, weight decay lambda and K one of the majorizers of `favor.optim.majorizers`,
    averaged over steps. The step has a natural length, lr = 1: on a full batch a certified K cannot increase the loss.
    On a batch of m rows the fraction makes the step shorter, as few rows say little about the :math:`d_\delta` inputs
    that are not damped away ("exact", whose K is of the batch alone, has no fraction). Use it on the head alone, with
    any optimizer on the body, and step both. The loss does not change: label smoothing, `ignore_index`, gradient
    accumulation, DDP and GradScaler (it unscales before it steps) need no change. The loss has to be the cross-entropy
    of a softmax of the head's output, a mean over rows with equal weights.

    Args:
        head: `nn.Linear` with weight `[n, d]`, or dicts `{"head": nn.Linear, ...}`. Weights are best kept in float32
            under mixed precision; curvature is always in float32.
        lr: eta. Default 1.
        weight_decay: lambda of lambda/2 |W|^2, bias included, inside the solve. Default 0.
        damping: delta as a fraction of the mean eigenvalue of K. Default 0.1.
        curvature: "bohning" (default: inputs alone, no logits, any number of labels), "diag" (one number per label,
            from logits), "block" (a d x d matrix per label, up to 2000 labels), "kfac" (a matrix over labels, up to
            2000; not a bound, and can diverge), "exact" (the bound of the batch itself, by conjugate gradients) or
            "geometric" (one number per label: a heuristic between two bounds and not a bound itself, see
            `favor.optim.majorizers.geometric`; for thousands of labels, with `lr=0.3, damping=0.001`).
        curvature_ema: fraction of the curvature of earlier steps that is kept, in [0, 1). Default 0.9; "exact" has
            none.
        max_rows: rows of a batch from which "diag", "block" and "kfac" are taken, evenly spread, and from which
            "geometric" takes logits (the inputs' second moment is that of all rows). Default 512, for "geometric" 64.
        order: order in which "diag", "kfac" and "exact" take the labels, see `bound_coefficients`. Default:
            "ascending", for "kfac" "descending". With thousands of labels "diag" is far better with "descending": rare
            labels then have a small curvature, as they should, and frequent ones a large one.
        process_group: of `torch.distributed`; statistics are averaged over it. Default: the default group.
        capture: whether to put a hook on the head that keeps its inputs. Without it, `set_batch` has to give them, as
            under `torch.compile(fullgraph=True)`. Default True.

    Raises:
        TypeError: if the head is not an `nn.Linear`.
        ValueError: for an option out of range, or a weight that is tied to another module's.

    Example:
        >>> import torch
        >>> from favor.optim import SoftmaxBound
        >>> body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        >>> optimizers = torch.optim.AdamW(body.parameters()), SoftmaxBound(head)
        >>> logits = head(body(torch.randn(16, 4)).relu())
        >>> torch.nn.functional.cross_entropy(logits, torch.randint(3, (16,))).backward()
        >>> for optimizer in optimizers:
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    See Also:
        BBM: full batches, with a guarantee of descent.

    References:
        Jebara and Choromanska, "Majorization for CRFs and latent likelihoods", 2012. Bohning, "Multinomial logistic
        regression algorithm", 1992. The structure of the bound for a softmax layer is derived in favor/optim/README.md.
    """

    def __init__(
        self,
        head: Heads,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        damping: float = 0.1,
        curvature: str = "bohning",
        curvature_ema: float = 0.9,
        max_rows: int | None = None,
        order: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        capture: bool = True,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "damping": damping, "curvature": curvature}
        defaults |= {"curvature_ema": curvature_ema, "max_rows": max_rows, "order": order}
        super().__init__(head, defaults, process_group, capture)

    def _check(self, options: Options) -> None:
        super()._check(options)
        if options["curvature"] not in CURVATURES:
            raise ValueError(f"curvature must be one of {', '.join(CURVATURES)}; got {options['curvature']!r}.")
        if not 0 <= options["curvature_ema"] < 1:
            raise ValueError(f"curvature_ema must be in [0, 1), got {options['curvature_ema']}.")
        if options["max_rows"] is not None and options["max_rows"] < 1:
            raise ValueError(f"max_rows must be at least 1, got {options['max_rows']}.")
        if options["order"] is not None and options["curvature"] in ("bohning", "block", "geometric"):
            raise ValueError(f"curvature {options['curvature']!r} has no order, got {options['order']!r}.")
        if options["damping"] + options["weight_decay"] <= 0:
            raise ValueError(
                "damping and weight_decay are both 0, and curvature alone has no inverse: set one of them."
            )

    def _direction(self, group: Options, state: Options, theta: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * theta
        curvature = self._curvature(group, state, theta, batch)
        damping = group["weight_decay"] + group["damping"] * curvature.mean_eigenvalue().item()
        if damping == 0:
            return torch.zeros_like(gradient)  # no input differs from 0, so no gradient does
        if isinstance(curvature, Exact):
            return group["lr"] * curvature.solve(gradient, damping)
        inverse = curvature.inverse(damping)
        # As many equally weighted rows have as much noise as the batch, over all processes.
        total, squares = self._mean(torch.stack((batch.weights.sum(), batch.weights.square().sum()))).tolist()
        rows = self._world_size() * total**2 / squares
        return inverse.apply(gradient).mul_(group["lr"] * rows / (rows + NOISE * (inverse.degrees + 1)))

    def _curvature(self, group: Options, state: Options, theta: Tensor, batch: Batch) -> Curvature:
        """Gives the majorizer, its factors averaged over processes and, except for "exact", over steps."""
        x, weights, name = batch.x, batch.weights, group["curvature"]
        if name == "exact":
            return exact(x @ theta.T, x, weights, group["order"] or "ascending", self._mean)
        if name != "bohning":
            x, weights = thinned(x, weights, group["max_rows"] or MAX_ROWS.get(name, 512))
        here = majorize(name, theta, x, weights, group["order"])
        if isinstance(here, Kronecker) and here.root and len(x) < len(batch.x):
            # Logits of all rows would be expensive; the second moment of their inputs is not.
            here = replace(here, inputs=second_moment(batch.x, batch.weights))
        now = averaged(here, weights.sum(), self._mean)
        kind = CURVATURES.index(name)
        if state.get("curvature") != kind:
            state["curvature"], state["averaged"] = kind, 0
        state["averaged"] += 1
        keep = group["curvature_ema"]
        # Divided by the sum of all weights so far, as in Adam: the mean is not biased towards its start.
        fresh = (1 - keep) / (1 - keep ** state["averaged"])
        factors = {field: value for field, value in vars(now).items() if isinstance(value, Tensor)}
        for field, value in factors.items():
            state[field] = state[field].lerp_(value, fresh) if state["averaged"] > 1 else value
        return replace(now, **{field: state[field] for field in factors})


def thinned(x: Tensor, weights: Tensor, max_rows: int) -> tuple[Tensor, Tensor]:
    """Takes at most this many of the rows, evenly spread, with the same total weight."""
    if len(x) <= max_rows:
        return x, weights
    kept = torch.linspace(0, len(x) - 1, max_rows, device=x.device).long()
    return x[kept], weights[kept] * (weights.sum() / weights[kept].sum())


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
