"""Parameters of the estimator that are learned: the attention output of each layer against that of exact attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from favor import favor_attention
from favor import features as families
from favor.features import Parameters, RandomFeatures
from favor.integrations.observe import Observation
from favor.integrations.stored import stored_choice, stored_parameters


class AttentionStudent(nn.Module):
    """G, L and the key shift of every head of every layer, as parameters.

    Any invertible G and L keep the estimate of the kernel unbiased, so training them trades variance alone.

    Args:
        modules: attention modules of the calibrated model by layer number; their stored parameters are the start.
        options: options of the backend, `model.config.favor`.
    """

    def __init__(self, modules: Mapping[int, nn.Module], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.options = dict(options)
        self.layers = nn.ParameterDict()
        self.choices: dict[int, dict[str, Any]] = {}
        for number, module in modules.items():
            own = stored_parameters(module)
            if own is None:
                continue
            self.choices[number] = stored_choice(module)
            for name, tensor in (("transform", own.transform), ("factor", own.factor), ("shift", own.shift)):
                self.layers[f"{name}_{number}"] = nn.Parameter(tensor.detach().clone())  # type: ignore[union-attr]
        self._family: dict[str, RandomFeatures] = {}

    def parameters_of(self, number: int) -> Parameters:
        """Parameters of a layer, `[Hk, d, d]`, with the inverse that belongs to them."""
        transform, factor, shift = (self.layers[f"{name}_{number}"] for name in ("transform", "factor", "shift"))
        return Parameters(transform, torch.linalg.inv(transform), factor, shift=shift)

    def all_parameters(self) -> dict[int, Parameters]:
        """Parameters of all layers, without gradient."""
        with torch.no_grad():
            return {number: self.parameters_of(number) for number in self.choices}

    def forward(self, observations: list[Observation], draw: int) -> Tensor:
        """Mean relative error of the heads that are estimated, over layers and sequences.

        Args:
            observations: of one forward pass of the exact model.
            draw: number of the random directions; new ones each step keep the parameters from fitting one draw.
        """
        errors = [
            relative_error(self.estimate(seen, draw), seen)[:, self._estimated(seen)].mean()
            for seen in observations
            if seen.layer in self.choices and self._estimated(seen)
        ]
        return torch.stack(errors).mean()

    def estimate(self, seen: Observation, draw: int) -> Tensor:
        """Attention of a layer with the present parameters, `[B, H, L, dv]`."""
        choice, options = self.choices[seen.layer], self.options
        return favor_attention(
            seen.query,
            seen.key,
            seen.value,
            features=self._family.setdefault(choice["family"], families.get(choice["family"])),
            num_features=options["num_features"],
            key_padding_mask=seen.padding,
            is_causal=seen.is_causal,
            scale=seen.scale,
            seed=options["seed"],
            layer=seen.layer,
            redraw=draw,
            orthogonal=options["orthogonal"],
            parameters=self.parameters_of(seen.layer),
            window=choice.get("window", options["window"]) if seen.is_self_attention else 0,
            kernel="torch",
        )

    def _estimated(self, seen: Observation) -> list[int]:
        """Query heads that do not stay exact."""
        exact, groups = self.choices[seen.layer].get("exact_heads", ()), seen.query.shape[1] // seen.key.shape[1]
        return [head for head in range(seen.query.shape[1]) if head // groups not in exact]


def relative_error(output: Tensor, seen: Observation) -> Tensor:
    """Frobenius norm of output - exact over that of exact, for each sequence and head `[B, H]`.

    Args:
        output: an approximation of the attention output, `[B, H, L, dv]`.
        seen: the layer's exact output; rows of padding do not count.
    """
    exact = seen.output
    difference = output - exact
    if seen.query_padding is not None:
        rows = seen.query_padding[:, None, :, None]
        difference, exact = difference * rows, exact * rows
    return difference.flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1).clamp(min=1e-12)
