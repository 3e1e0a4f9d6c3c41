"""BBM, SPFB and SBM: the papers' optimizers of logistic regression, corrected where the printed algorithms diverge."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from favor.optim.bound import bound_coefficients, bound_factor
from favor.optim.head import Batch, Closure, HeadOptimizer, Heads, Options, subtract
from favor.optim.majorizers import CERTIFIED, Curvature, averaged, exact, majorize
from favor.optim.single import rank_one_step

HALVINGS = 20
MAX_SIZE = 5000


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
        head: Heads,
        lr: float = 1.0,
        weight_decay: float = 1e-4,
        curvature: str = "exact",
        order: str = "ascending",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "curvature": curvature, "order": order}
        super().__init__(head, defaults, process_group)

    def _check(self, options: Options) -> None:
        super()._check(options)
        if not 0 < options["lr"] < 2:
            raise ValueError(f"lr must be between 0 and 2, got {options['lr']}.")
        if options["weight_decay"] == 0:
            raise ValueError("weight_decay must be positive: curvature alone has no inverse.")
        known = (*CERTIFIED, "diag", "kfac")
        if options["curvature"] not in known:
            raise ValueError(f"curvature must be one of {', '.join(known)}; got {options['curvature']!r}.")

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

        def first() -> Any:
            self._loss = closure()
            return self._loss

        self._again = torch.enable_grad()(closure)
        try:
            return super().step(first)
        finally:
            del self._again, self._loss

    def _objective(self, loss: Any, group: Options) -> float:
        like = group["params"][0]
        data = self._mean(torch.as_tensor(loss, dtype=torch.float64, device=like.device).detach().clone())
        return data.item() + group["weight_decay"] / 2 * sum(p.double().square().sum().item() for p in group["params"])

    def _direction(self, group: Options, state: Options, theta: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        curvature: Curvature
        if group["curvature"] == "exact":
            curvature = exact(batch.x @ theta.T, batch.x, batch.weights, group["order"], self._mean)
        else:
            here = majorize(group["curvature"], theta, batch.x, batch.weights)
            curvature = averaged(here, batch.weights.sum(), self._mean)
        decay = group["weight_decay"]
        return group["lr"] * curvature.solve(gradient + decay * theta, decay)

    def _move(self, group: Options, change: Tensor) -> None:
        if group["curvature"] in CERTIFIED:
            super()._move(group, change)
            return
        parameters, before = group["params"], self._objective(self._loss, group)
        kept = [parameter.clone() for parameter in parameters]
        for halving in range(HALVINGS):
            subtract(parameters, change * 0.5**halving)
            if self._objective(self._again(), group) <= before:
                return
            for parameter, start in zip(parameters, kept, strict=True):
                parameter.copy_(start)


class SPFB(HeadOptimizer):
    r"""Stochastic partition function bound: the whole curvature of the mini-batch.

    .. math:: W \leftarrow W - \eta\, (\Sigma_b + (\lambda + \delta) I)^{-1} (G + \lambda W)

    with the bound's curvature Sigma_b of the batch and damping delta = `damping` times the mean |x|^2 of the batch. A
    batch of one example costs O(n d), other batches conjugate gradients, or a dense solve if that costs less.

    The published form (`literal`) has delta = 0 and eta = lr / t at step t. It does not converge to the optimum on
    batches of one example: gradient and curvature come from the same example, and the mean of their quotient is not
    zero where the mean gradient is zero. The bias falls like one over the batch size.

    Args:
        head: `nn.Linear` `[n, d]`, or dicts `{"head": nn.Linear, ...}`.
        lr: eta. Default 1.
        weight_decay: lambda, bias included. Default 1e-4.
        damping: delta divided by the mean |x|^2. Default 1e-2.
        literal: the published form; it does not use `damping`. Default False.
        order: of the labels in the bound: "ascending" (default), "descending" or "none".
        process_group: of `torch.distributed`; statistics are averaged over it. Default: the default group.

    Raises:
        TypeError: if the head is not an `nn.Linear`.
        ValueError: for an option out of range, or a tied weight.

    References:
        Wang and Choromanska, "SGB: Stochastic Gradient Bound", section 2.2.

    Example:
        >>> import torch
        >>> from favor.optim import SPFB
        >>> head = torch.nn.Linear(4, 3)
        >>> optimizer = SPFB(head)
        >>> torch.nn.functional.cross_entropy(head(torch.randn(4, 4)), torch.randint(3, (4,))).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        head: Heads,
        lr: float = 1.0,
        weight_decay: float = 1e-4,
        damping: float = 1e-2,
        literal: bool = False,
        order: str = "ascending",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "damping": damping, "literal": literal, "order": order}
        super().__init__(head, defaults, process_group)

    def _check(self, options: Options) -> None:
        super()._check(options)
        if options["weight_decay"] + (0 if options["literal"] else options["damping"]) <= 0:
            raise ValueError(
                "curvature alone has no inverse: weight_decay, or damping without literal, must be positive."
            )

    def _direction(self, group: Options, state: Options, theta: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        decay, rate, damping = group["weight_decay"], group["lr"], group["weight_decay"]
        norms = batch.x.square().sum(-1)
        if group["literal"]:
            rate /= state["step"]
        else:
            damping += group["damping"] * self._mean(batch.weights @ norms).item()
        if len(norms) == 1 and self._world_size() == 1:
            x, norm2 = batch.x[0], norms.item()
            residual = gradient @ x / max(norm2, torch.finfo(x.dtype).tiny)
            push, keep = rank_one_step(theta @ x, residual, norm2, rate, decay, damping, group["order"])
            return (1 - keep) * theta - torch.outer(push, x)
        sigma = exact(batch.x @ theta.T, batch.x, batch.weights, group["order"], self._mean)
        return rate * sigma.solve(gradient + decay * theta, damping)


class SBM(HeadOptimizer):
    r"""Stochastic bound majorization: the curvature of all examples seen so far, inverted as it grows.

    With T examples, :math:`M = (\lambda T I + \sum_i \Sigma_i)^{-1}` over the examples i seen and the sum g of a
    batch's gradients (each with its share :math:`\lambda W` of weight decay):

    - "online": :math:`W \leftarrow W - \eta M g`, eta from 1 to 3;
    - "accumulated", the paper's Algorithm 2 with regularization counted once per example and not once per label:
      :math:`W \leftarrow W - \eta\, (m / T)\, M \sum g` over all batches so far, of size m.

    M is a dense (n d) x (n d) matrix in float64, updated by the Woodbury identity in O(m n (n d)^2); n d up to 5000.

    Args:
        head: `nn.Linear` `[n, d]`.
        num_examples: T, the size of the training set.
        lr: eta. Default 1.
        weight_decay: lambda > 0 of lambda/2 |W|^2, which is added to the mean loss, bias included. Default 1e-4.
        variant: "online" (default) or "accumulated".
        order: of the labels in the bound: "descending" (default), "ascending" or "none".

    Raises:
        TypeError: if the head is not an `nn.Linear`.
        ValueError: for an option out of range, a tied weight, or n d above 5000; in `step`, on several processes.

    References:
        Choromanska and Jebara, "Stochastic bound majorization", Algorithm 2.

    Example:
        >>> import torch
        >>> from favor.optim import SBM
        >>> head = torch.nn.Linear(4, 3)
        >>> optimizer = SBM(head, num_examples=4)
        >>> torch.nn.functional.cross_entropy(head(torch.randn(4, 4)), torch.randint(3, (4,))).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        head: Heads,
        num_examples: int,
        lr: float = 1.0,
        weight_decay: float = 1e-4,
        variant: str = "online",
        order: str = "descending",
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "variant": variant, "order": order}
        super().__init__(head, defaults | {"num_examples": num_examples})

    def _check(self, options: Options) -> None:
        super()._check(options)
        size = sum(parameter.numel() for parameter in options["params"])
        if size > MAX_SIZE:
            raise ValueError(f"the head has {size} parameters, and SBM's matrix is dense: up to {MAX_SIZE}.")
        if options["variant"] not in ("online", "accumulated"):
            raise ValueError(f"variant must be online or accumulated, got {options['variant']!r}.")
        if options["weight_decay"] == 0 or options["num_examples"] < 1:
            raise ValueError("weight_decay must be positive and num_examples at least 1.")

    def _direction(self, group: Options, state: Options, theta: Tensor, gradient: Tensor, batch: Batch) -> Tensor:
        if self._world_size() > 1:
            raise ValueError("SBM keeps one matrix of all examples in order: run it on one process.")
        total = group["weight_decay"] * group["num_examples"]
        if "inverse" not in state:
            state["inverse"] = torch.eye(theta.numel(), dtype=torch.float64, device=theta.device) / total
        # M <- (M^{-1} + sum_j B_j (x) x_j x_j')^{-1} in place, by the Woodbury identity.
        inverse = state["inverse"]
        factor = bound_factor(bound_coefficients(batch.x @ theta.T, group["order"])).to(inverse)
        rows = torch.einsum("mkn,md->mknd", factor, batch.x.to(inverse)).flatten(2).flatten(0, 1)
        if len(rows):
            image = rows @ inverse
            middle = image @ rows.T
            middle.diagonal().add_(1)
            half = torch.linalg.solve_triangular(torch.linalg.cholesky(middle), image, upper=False)
            inverse.addmm_(half.T, half, alpha=-1)
        summed = len(batch.x) * (gradient + group["weight_decay"] * theta).double().flatten()
        length = group["lr"]
        if group["variant"] == "accumulated":
            summed = state["gradients"] = state.get("gradients", 0) + summed
            length *= len(batch.x) / group["num_examples"]
        return length * (inverse @ summed).reshape(theta.shape).to(theta)
