"""BBM: batch bound majorization, with a guarantee of descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from favor.optim.exact import Exact, exact
from favor.optim.head import Closure, HeadOptimizer, joined, subtract
from favor.optim.inputs import Batch
from favor.optim.majorizers import CERTIFIED, MAJORIZERS, Blocks, Kronecker, averaged, majorize

HALVINGS = 20


class BBM(HeadOptimizer):
    r"""Batch bound majorization of an l2-regularized softmax layer.

    .. math:: W \leftarrow W - \eta\, (K + \lambda I)^{-1} (G + \lambda W)

    with the gradient G of the mean loss over all data (rows of equal weight, see `set_batch` for others) and K a bound
    on its curvature. For 0 < eta < 2 and a certified K no step increases the objective, and convergence is linear; 1.9
    takes about half the steps of 1. With an uncertified K the step is halved until the objective does not increase,
    which costs one more call of the closure each time.

    Args:
        head: `nn.Linear` `[n, d]`, or dicts `{"head": nn.Linear, ...}`.
        lr: eta, in (0, 2). Default 1.
        weight_decay: lambda > 0 of lambda/2 |W|^2, bias included; the loss of the closure must leave it out.
        curvature: certified: "exact" (default), "bohning", "spectral", "block"; uncertified: "diag", "kfac".
        order: of the labels with "exact": "ascending" (default), "descending" or "none".
        process_group: of `torch.distributed`; statistics are averaged over it. Default: the default group.

    Raises:
        TypeError: if the head is not an `nn.Linear`.
        ValueError: for an option out of range, or a tied weight.

    References:
        Jebara and Choromanska, "Majorization for CRFs and latent likelihoods", 2012, Algorithm 2. Choromanska and
        Jebara, "Stochastic bound majorization", section 2.

    Example:
        >>> import torch
        >>> from favor.optim import BBM
        >>> head = torch.nn.Linear(4, 3)
        >>> optimizer = BBM(head)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(head(x), y)
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
    """

    def __init__(
        self,
        head: nn.Linear | Iterable[dict[str, Any]],
        lr: float = 1.0,
        weight_decay: float = 1e-4,
        curvature: str = "exact",
        order: str = "ascending",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "curvature": curvature, "order": order}
        super().__init__(head, defaults, process_group)

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        if not 0 < options["lr"] < 2:
            raise ValueError(f"lr must be between 0 and 2, got {options['lr']}.")
        if options["weight_decay"] == 0:
            raise ValueError("weight_decay must be positive: curvature alone has no inverse.")
        if options["curvature"] not in ("exact", *MAJORIZERS):
            raise ValueError(f"curvature must be one of exact, {', '.join(MAJORIZERS)}; got {options['curvature']!r}.")

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Takes one step.

        Args:
            closure: clears gradients, computes the mean loss over all data, calls `backward` and returns the loss.

        Returns:
            The loss before the step.

        Raises:
            TypeError: without a closure.
        """
        if closure is None:
            raise TypeError("BBM needs a closure that computes the loss of all data and its gradient.")
        found: list[Any] = []

        def first() -> Any:
            found.append(closure())
            return found[0]

        def again() -> Any:
            with torch.enable_grad():
                return closure()

        self._losses = found, again
        try:
            return super().step(first)
        finally:
            del self._losses

    def _objective(self, loss: Any, group: dict[str, Any]) -> float:
        like = group["params"][0]
        data = self._mean(torch.as_tensor(loss, dtype=torch.float64, device=like.device).detach().clone())
        return data.item() + group["weight_decay"] / 2 * sum(p.double().square().sum().item() for p in group["params"])

    def _direction(
        self, group: dict[str, Any], state: dict[str, Any], theta: Tensor, gradient: Tensor, batch: Batch
    ) -> Tensor:
        curvature: Kronecker | Blocks | Exact
        if group["curvature"] == "exact":
            curvature = exact(batch.x @ theta.T, batch.x, batch.weights, order=group["order"], reduce=self._mean)
        else:
            curvature = averaged(
                majorize(group["curvature"], theta, batch.x, batch.weights), batch.weights.sum(), self._mean
            )
        decay = group["weight_decay"]
        return group["lr"] * curvature.solve(gradient + decay * theta, decay)

    def _update(self, group: dict[str, Any], head: nn.Linear, batch: Batch) -> None:
        if group["curvature"] in ("exact", *CERTIFIED):
            super()._update(group, head, batch)
            return
        parameters, (first, again) = group["params"], self._losses
        kept = [parameter.clone() for parameter in parameters]
        before = self._objective(first[0], group)
        theta, gradient = joined(head, kept), joined(head, [parameter.grad for parameter in parameters])
        direction = self._direction(group, self.state[head.weight], theta, gradient, batch)
        for halving in range(HALVINGS):
            for parameter, start in zip(parameters, kept, strict=True):
                parameter.copy_(start)
            subtract(parameters, direction * 0.5**halving)
            if self._objective(again(), group) <= before:
                return
        for parameter, start in zip(parameters, kept, strict=True):
            parameter.copy_(start)
