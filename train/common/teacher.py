"""Learning from a model that runs exact attention: from its hidden states and predictions, or from each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from favor import favor_attention
from favor.attention.directions import Draw
from favor.attention.directions import directions as drawn_directions
from favor.features import Parameters, PositiveFeatures
from favor.integrations.adapt.observe import Observation, observe, relative_error
from favor.integrations.layer import decodes, stored_choice, stored_parameters
from favor.integrations.modules import evaluating


@dataclass(frozen=True)
class Teacher:
    """An exact model that a student learns from.

    Attributes:
        model: the teacher, on the device of the student; it is not trained.
        hidden_weight, logits_weight: of `hidden_loss` and `logits_loss`.
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
        """Computes the loss of a student, prepared for training or not; raises ValueError as `hidden_loss`."""
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

    States are `[B, L, n]`; the first are the embeddings, and do not count. The mask `[B, L]` is 0 for padding. Raises
    ValueError if student and teacher have different shapes.
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
    """Computes the Kullback-Leibler divergence of logits `[..., n]`, mean over the rows that the mask `[...]` has."""
    log_p, log_q = (own.float().log_softmax(-1) for own in (goal, found))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    if mask is None:
        return divergence.mean()
    return (divergence * mask).sum() / mask.sum().clamp(min=1)


class AttentionStudent(nn.Module):
    """A learned correction (C, D, c) of the parameters (G, L, b) of every head of every layer: G C, D L, b + c.

    Any invertible G and L keep the estimate of the kernel unbiased, so training them changes the variance alone.
    Learned directions make the estimate biased, and closer to the kernel on data like those that they learn from.

    Args:
        modules: attention modules of the model by layer number.
        features: the family.
        options: options of the backend, `model.config.favor`. With `statistics="calibrated"` the parameters stored in
            the modules are corrected, otherwise the parameters of each sequence.
        shapes: number of key heads and head_dim of every layer to learn.
        learn_directions: whether the directions are learned too, beginning with the random ones.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        features: PositiveFeatures,
        options: Mapping[str, Any],
        shapes: Mapping[int, tuple[int, int]],
        learn_directions: bool = False,
    ) -> None:
        super().__init__()
        self.features, self.options = features, dict(options)
        self.choices = {number: stored_choice(modules[number]) for number in shapes}
        self.base: dict[int, Parameters | None] = dict.fromkeys(shapes)
        if options["statistics"] == "calibrated":
            self.base = {number: stored_parameters(modules[number]) for number in shapes}
        self.layers, self.directions = nn.ParameterDict(), nn.ParameterDict()
        for number, (heads, head_dim) in shapes.items():
            # Differences from the identity, so that one learning rate fits all heads, whatever their norms.
            self.layers[f"transform_{number}"] = nn.Parameter(torch.zeros(heads, head_dim, head_dim))
            self.layers[f"factor_{number}"] = nn.Parameter(torch.zeros(heads, head_dim, head_dim))
            self.layers[f"shift_{number}"] = nn.Parameter(torch.zeros(heads, head_dim))
            if learn_directions:
                numbers = (options["num_features"], head_dim, heads, options["orthogonal"], options["seed"], number, 0)
                drawn = drawn_directions(Draw(features.draws_like, *numbers, torch.device("cpu"), torch.float32))
                self.directions[str(number)] = nn.Parameter(drawn.clone())

    def correction(self, number: int) -> Parameters:
        """Gives the correction of a layer, `[Hk, d, d]` and `[Hk, d]`."""
        transform, factor, shift = (self.layers[f"{name}_{number}"] for name in ("transform", "factor", "shift"))
        eye = torch.eye(transform.shape[-1], device=transform.device)
        transform = eye + transform
        directions = self.directions.get(str(number), None)
        return Parameters(transform, torch.linalg.inv(transform), eye + factor, shift=shift, directions=directions)

    @torch.no_grad()
    def result(self) -> dict[int, Parameters]:
        """Gives the values to store: corrected parameters if the layer has stored parameters, else the corrections."""
        corrections = {number: self.correction(number) for number in self.choices}
        return {n: c if self.base[n] is None else self.base[n].corrected(c) for n, c in corrections.items()}  # type: ignore[union-attr]

    def forward(self, observations: list[Observation], draw: int) -> Tensor:
        """Computes the mean relative error (less is better) of the estimated heads, over layers and sequences.

        The observations are of one forward pass of the exact model. If directions are not learned, new ones in each
        `draw` keep the parameters from fitting one draw alone.
        """
        errors = [
            relative_error(self.estimate(seen, draw), seen)[:, self._estimated(seen)].mean()
            for seen in observations
            if seen.layer in self.choices and self._estimated(seen)
        ]
        return torch.stack(errors).mean()

    @torch.no_grad()
    def head_errors(self, observations: list[Observation]) -> dict[int, Tensor]:
        """Computes the relative error of each key head, `[Hk]` by layer, mean over calls, sequences and query heads."""
        errors: dict[int, list[Tensor]] = {}
        for seen in observations:
            if seen.layer in self.choices:
                found = relative_error(self.estimate(seen, 0), seen).unflatten(1, (seen.key.shape[1], -1))
                errors.setdefault(seen.layer, []).append(found.mean((0, 2)))
        return {layer: torch.stack(own).mean(0) for layer, own in errors.items()}

    def estimate(self, seen: Observation, draw: int) -> Tensor:
        """Computes the attention of a layer with the present parameters, `[B, H, L, dv]`."""
        choice, options, base = self.choices[seen.layer], self.options, self.base[seen.layer]
        return favor_attention(
            seen.query,
            seen.key,
            seen.value,
            features=self.features,
            num_features=options["num_features"],
            key_padding_mask=seen.padding,
            is_causal=seen.is_causal,
            scale=seen.scale,
            relative=seen.relative,
            seed=options["seed"],
            layer=seen.layer,
            redraw=0 if str(seen.layer) in self.directions else draw,  # learned ones need no new draw
            orthogonal=options["orthogonal"],
            parameters=base,
            correction=self.correction(seen.layer),
            window=choice.get("window", options["window"]) if seen.is_self_attention else 0,
            kernel="torch",
        )

    def _estimated(self, seen: Observation) -> list[int]:
        """Lists the query heads that do not stay exact."""
        exact, groups = self.choices[seen.layer].get("exact_heads", ()), seen.query.shape[1] // seen.key.shape[1]
        return [head for head in range(seen.query.shape[1]) if head // groups not in exact]


def layers_of(model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[dict[int, tuple[int, int]], bool]:
    """Finds key heads and head_dim of every attention layer for these inputs, and whether any is causal or decodes."""
    seen: list[Observation] = []
    with torch.no_grad(), evaluating(model), observe(model, seen.append):
        model(**inputs)
    return {o.layer: (o.key.shape[1], o.key.shape[3]) for o in seen}, any(
        o.is_causal or decodes(o.module) for o in seen
    )
