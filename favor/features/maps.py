"""Feature maps that do not estimate the softmax kernel: the linear-attention baselines of the FAVOR papers."""

from __future__ import annotations

import torch
from torch import Tensor

from favor.features.base import SignedFeatures


class ReLUFeatures(SignedFeatures):
    """phi(x) = max(omega x, 0): the generalised attention of Choromanski et al. (2021), appendix, with f = ReLU.

    No constant is added to the features. The result does not depend on the scale of the queries.
    """

    name = "relu"

    def phi(self, x: Tensor, omega: Tensor) -> Tensor:
        """`[..., L, M]`."""
        return torch.relu(x @ omega.transpose(-1, -2))


class ELUFeatures(SignedFeatures):
    """phi(x) = elu(x) + 1 (Katharopoulos et al., "Transformers are RNNs", 2020, equation (7)).

    Deterministic: it has head_dim features, and takes neither their number nor a seed into account.
    """

    name = "elu"

    def phi(self, x: Tensor, omega: Tensor) -> Tensor:
        """`[..., L, d]`."""
        return torch.nn.functional.elu(x) + 1
