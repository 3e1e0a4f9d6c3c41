"""Features that may have any sign or are not exponentials: trigonometric features, and the ReLU and ELU maps.

They are the baselines of the FAVOR papers. The maps do not estimate the softmax kernel.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from favor.features.base import RandomFeatures, SignedFeatures
from favor.registry import register


@register
class TrigRF(SignedFeatures):
    """Trigonometric features of the softmax kernel, in two forms.

    - "sincos" (default): for each direction v the pair exp(|x|^2/2) (cos(v.x), sin(v.x)); relative variance per
      direction cosh(|x - y|^2) - 1. Source: Rahimi and Recht (2007).
    - "phase": sqrt(2) exp(|x|^2/2) cos(v.x + theta) on both sides, theta uniform on [0, 2 pi]; relative variance per
      feature e^r + e^-r/2 - 1, r = |x - y|^2. FAVOR#, equation (7), where the second cosine is printed with the wrong
      sign of v.y and would estimate exp(-x.y).

    Estimated attention weights can be negative; use a positive family to replace softmax attention.

    Args:
        alpha: see `RandomFeatures`.
        form: "sincos" or "phase".

    Raises:
        ValueError: for another form.

    Example:
        >>> import torch, favor
        >>> features = favor.features.TrigRF()
        >>> features.phi(torch.randn(5, 8), features.draw(16, 8).float()).shape  # 8 cosines, 8 sines
        torch.Size([5, 16])
    """

    name = "trig"

    def __init__(self, *, alpha: float = 0.0, form: Literal["sincos", "phase"] = "sincos") -> None:
        super().__init__(alpha=alpha)
        if form not in ("sincos", "phase"):
            raise ValueError(f'form must be "sincos" or "phase", got {form!r}.')
        self.form = form

    @property
    def draws_like(self) -> str | RandomFeatures:
        """Its name, which stands for the default form."""
        return self.name if self.form == "sincos" else self

    def draw(self, num_features: int, head_dim: int, **options: Any) -> Tensor:
        """Draws omega, `[*batch_shape, num_features / 2, d]` ("sincos") or, with phases, `[..., num_features, d + 1]`.

        Raises:
            ValueError: for "sincos" and an odd number of features, since they come in pairs.
        """
        if self.form == "sincos":
            if num_features % 2:
                raise ValueError(f"sin/cos features come in pairs: num_features must be even, got {num_features}.")
            num_features //= 2
        omega = super().draw(num_features, head_dim, **options)
        if self.form == "sincos":
            return omega
        shape, generator = (*omega.shape[:-1], 1), options.get("generator")
        theta = torch.rand(shape, dtype=omega.dtype, device="cpu", generator=generator)
        return torch.cat((omega, 2 * math.pi * theta), dim=-1)

    def phi(self, x: Tensor, omega: Tensor) -> Tensor:
        """Computes cos(v.x), sin(v.x) or sqrt(2) cos(v.x + theta), without the factor exp(|x|^2/2), `[..., L, F]`.

        mean over directions (rows of omega) of phi(x) phi(y) exp(log_scale(x) + log_scale(y)) is unbiased for K.
        """
        if self.form == "phase":
            angle = x @ omega[..., :-1].transpose(-1, -2) + omega[..., -1].unsqueeze(-2)
            return math.sqrt(2) * angle.cos()
        angle = x @ omega.transpose(-1, -2)
        return torch.cat((angle.cos(), angle.sin()), dim=-1)

    def log_scale(self, x: Tensor) -> Tensor:
        """Gives (1/2 + alpha) |x|^2, `[..., L]`."""
        return (0.5 + self.alpha) * x.square().sum(-1)

    def kernel(self, x: Tensor, y: Tensor, omega: Tensor) -> Tensor:
        """Estimates K without bias for all pairs, `[..., L, S]`."""
        scale = self.log_scale(x).unsqueeze(-1) + self.log_scale(y).unsqueeze(-2)
        product = self.phi(x, omega) @ self.phi(y, omega).transpose(-1, -2)
        return product * scale.exp() / omega.shape[-2]

    def log_relative_second_moment(self, x: Tensor, y: Tensor) -> Tensor:
        """Computes log(1 + Var / K^2) of one direction, for all pairs `[..., L, S]`."""
        r = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
        if self.form == "phase":
            return torch.logaddexp(r, -r - math.log(2))
        return torch.logaddexp(r, -r) - math.log(2)


@register
class ReLUFeatures(SignedFeatures):
    """phi(x) = max(omega x, 0): the generalised attention of Choromanski et al. (2021), appendix, with f = ReLU.

    No constant is added to the features. The result does not depend on the scale of the queries.

    Args:
        alpha: see `RandomFeatures`.

    Example:
        >>> import torch, favor
        >>> features = favor.features.ReLUFeatures()
        >>> features.phi(torch.tensor([[-1.0, 2.0]]), torch.eye(2))
        tensor([[0., 2.]])
    """

    name = "relu"

    def phi(self, x: Tensor, omega: Tensor) -> Tensor:
        """Computes the features, `[..., L, M]`."""
        return torch.relu(x @ omega.transpose(-1, -2))


@register
class ELUFeatures(SignedFeatures):
    """phi(x) = elu(x) + 1 (Katharopoulos et al., "Transformers are RNNs", 2020, equation (7)).

    Deterministic: it has head_dim features, and takes neither their number nor a seed into account.

    Args:
        alpha: see `RandomFeatures`.

    Example:
        >>> import torch, favor
        >>> features = favor.features.ELUFeatures()
        >>> features.phi(torch.tensor([[0.0, 1.0]]), torch.eye(2))
        tensor([[1., 2.]])
    """

    name = "elu"
    is_drawn = False
    counts_features = False

    def phi(self, x: Tensor, omega: Tensor) -> Tensor:
        """Computes the features, `[..., L, d]`."""
        return torch.nn.functional.elu(x) + 1
