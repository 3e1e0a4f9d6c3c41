"""Learning from a teacher: a model that runs exact attention, and whose hidden states and predictions are matched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Teacher:
    """An exact model that a student learns from.

    Attributes:
        model: the teacher, on the device of the student; it is not trained.
        hidden_weight: of the hidden states in the loss, see `hidden_loss`.
        logits_weight: of the predictions, see `logits_loss`.
        task_weight: of the student's own loss, for batches with labels.
        is_regression: whether the predictions are numbers, compared by their squared difference.
        columns: the teacher's output that each output of the student is compared with. None: that of the same number.
    """

    model: PreTrainedModel
    hidden_weight: float = 1.0
    logits_weight: float = 1.0
    task_weight: float = 0.0
    is_regression: bool = False
    columns: Sequence[int] | None = None

    def loss(self, student: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the loss of a student, prepared for training or not, for a batch of the model's arguments.

        Raises:
            ValueError: if hidden states are matched, and those of teacher and student have different shapes.
        """
        hidden = {"output_hidden_states": True} if self.hidden_weight else {}
        found = student(**batch, **hidden)
        with torch.no_grad():
            goal = self.model(**{name: own for name, own in batch.items() if name != "labels"}, **hidden)
        total = found.loss * self.task_weight if self.task_weight else 0.0
        if self.hidden_weight:
            mask = batch.get("attention_mask")
            mask = getattr(goal, "attention_mask", mask)  # an encoder of speech has fewer frames than its input
            total = total + self.hidden_weight * hidden_loss(found.hidden_states, goal.hidden_states, mask)
        if self.logits_weight and getattr(goal, "logits", None) is not None:
            mask = batch.get("attention_mask") if goal.logits.ndim == 3 else None
            own = (found.logits, goal.logits if self.columns is None else goal.logits[..., list(self.columns)])
            difference = nn.functional.mse_loss(*own) if self.is_regression else logits_loss(*own, mask)
            total = total + self.logits_weight * difference
        return total  # type: ignore[return-value]


def hidden_loss(found: tuple[Tensor, ...], goal: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """Computes the relative squared error of the hidden states after each layer, mean over layers.

    Args:
        found, goal: those of student and teacher, each `[B, L, n]`; the first are the embeddings, and do not count.
        mask: `[B, L]`, 0 for padding; None without.

    Raises:
        ValueError: if they have different shapes.
    """
    shapes = [[tuple(own.shape) for own in states] for states in (found, goal)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"hidden states of student and teacher are compared layer by layer, and the student has {len(found) - 1} "
            f"layers of {shapes[0][-1][-1]} numbers and the teacher {len(goal) - 1} of {shapes[1][-1][-1]}: give a "
            "teacher of the same shape, or set hidden_weight to 0"
        )
    errors = [relative_squared_error(own, exact, mask) for own, exact in zip(found[1:], goal[1:], strict=True)]
    return torch.stack(errors).mean()


def relative_squared_error(found: Tensor, goal: Tensor, mask: Tensor | None) -> Tensor:
    """Divides the squared norm of the difference of rows `[B, L, n]` by that of `goal`; `mask` as in `hidden_loss`."""
    goal = goal.to(found.dtype)  # an exact model in lower precision
    counts = 1.0 if mask is None else mask.unsqueeze(-1).to(goal.dtype)
    return ((found - goal) * counts).square().sum() / (goal * counts).square().sum().clamp(min=1e-12)


def logits_loss(found: Tensor, goal: Tensor, mask: Tensor | None) -> Tensor:
    """Computes the Kullback-Leibler divergence of predictions, mean over rows.

    Args:
        found, goal: logits of student and teacher, `[..., n]`.
        mask: `[...]`, 0 for rows that do not count; None if all count.
    """
    log_p, log_q = (own.float().log_softmax(-1) for own in (goal, found))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    if mask is None:
        return divergence.mean()
    return (divergence * mask).sum() / mask.sum().clamp(min=1)
