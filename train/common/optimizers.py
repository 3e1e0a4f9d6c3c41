"""The optimizer of a training program: AdamW on the body, AdamW or the softmax bound on the head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from favor.optim import CombinedOptimizer, SoftmaxBound
from favor.train.common.arguments import SOFTMAX_BOUND, HeadArguments, RunArguments


def find_head(model: nn.Module, num_labels: int) -> nn.Linear:
    """Finds the output layer: the last linear layer of a model with one output per label.

    Raises:
        ValueError: if there is no such layer.
    """
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == num_labels]
    if not heads:
        raise ValueError(f"{type(model).__name__} has no linear layer with {num_labels} outputs for head_optimizer")
    return heads[-1]


def make_optimizer(
    model: nn.Module, arguments: RunArguments, head_arguments: HeadArguments, num_labels: int
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Makes the optimizer; returns it and the parameters whose gradients are to be clipped.

    AdamW decays matrices alone: biases and normalisations are vectors. The softmax bound has a step length of its own,
    so its gradient is not clipped.

    Args:
        model: with an output layer of `num_labels`.
        arguments: learning rate and weight decay.
        head_arguments: options of the output layer.
        num_labels: number of labels of the task; 1 is a regression.

    Raises:
        ValueError: if `head_arguments` asks for the softmax bound and the task is a regression.
    """
    rate, decay = head_arguments.head_learning_rate, arguments.weight_decay
    bound = head_arguments.head_optimizer == SOFTMAX_BOUND
    if bound and num_labels < 2:
        raise ValueError(f"head_optimizer {SOFTMAX_BOUND} is for a softmax, and this task is a regression: use adamw")
    everything = list(model.parameters())
    if not bound and rate is None:
        return torch.optim.AdamW(adamw_groups(everything, decay), lr=arguments.learning_rate, fused=True), everything
    head = find_head(model, num_labels)
    of_head = {id(p) for p in head.parameters()}
    body = [p for p in everything if id(p) not in of_head]
    groups = adamw_groups(body, decay)
    if not bound:
        groups += [{**group, "lr": rate} for group in adamw_groups(head.parameters(), decay)]
        return torch.optim.AdamW(groups, lr=arguments.learning_rate, fused=True), everything
    bounded = SoftmaxBound(head) if rate is None else SoftmaxBound(head, lr=rate)
    return CombinedOptimizer(torch.optim.AdamW(groups, lr=arguments.learning_rate, fused=True), bounded), body


def adamw_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Makes parameter groups with weight decay on matrices alone."""
    parameters = list(parameters)
    decayed, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
