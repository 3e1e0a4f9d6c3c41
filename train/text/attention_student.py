"""Learning of the estimator's parameters, so that the output of each attention layer comes close to the exact one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from favor import favor_attention
from favor.attention.directions import Draw
from favor.attention.directions import directions as drawn_directions
from favor.features import Parameters, PositiveFeatures
from favor.integrations.adapt.observe import Observation, relative_error
from favor.integrations.layer import stored_choice, stored_parameters


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

        Args:
            observations: from one forward pass of the exact model.
            draw: number of the draw of random directions, if they are not learned; new directions in each step keep
                the parameters from fitting one draw alone.
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
