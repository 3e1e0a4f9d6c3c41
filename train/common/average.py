"""Exponential moving average of the weights, which is evaluated and saved in place of the last weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel


def weight_average(model: torch.nn.Module, decay: float) -> AveragedModel:
    """Makes an average of a model's weights, to be updated after every optimizer step.

    The decay grows with the steps, min(decay, (1 + n) / (10 + n)), so that the first weights are soon forgotten.
    Buffers are copied from the model.

    Args:
        model: the model whose weights are averaged, on its device.
        decay: of the average, in [0, 1).

    Returns:
        The average, with `update_parameters(model)`, `module` and a state for checkpoints.
    """

    def average(averaged: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
        rate = min(decay, (1 + int(count)) / (10 + int(count)))
        return torch.lerp(averaged, new, 1 - rate)

    return AveragedModel(model, avg_fn=average)
