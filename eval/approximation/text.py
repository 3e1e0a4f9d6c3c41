"""Samples of a text, and the model that reads them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from favor.eval.approximation import model as whole
from favor.eval.approximation.measure import measure
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import Variant
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.train.text.samples import samples


class TextSamples:
    """Samples of `--text`, in lengths of `--length`, and the model that reads them.

    Attributes:
        model: with exact attention.
        tokenizer: that of the model.
        sizes: tokens of a sample; several are compared.
    """

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        path = arguments.model or str(minilm_path())
        self.arguments = arguments
        self.tokenizer, self.model = whole.load(path, device)
        self.sizes: list[int] = arguments.lengths

    def measured(
        self, size: int, found: Sequence[Variant], others: Mapping[Variant, PreTrainedModel] | None = None
    ) -> Measured:
        """Measures variants on samples of one length."""
        return measure(
            self.model,
            self._ids(self.arguments.text, size),
            found,
            mask_id=self.tokenizer.mask_token_id,
            seed=self.arguments.seed,
            query_samples=self.arguments.query_samples,
            period=self.arguments.position_period,
            others=others,
        )

    def inputs_to_choose(self) -> list[dict[str, Tensor]]:
        """Makes arguments of the model from the text of `--choose_on`, in the greatest length."""
        ids, period = self._ids(self.arguments.choose_on, self.sizes[-1]), self.arguments.position_period
        return [whole.text_inputs(self.model, sample, period) for sample in ids.split(1)]

    def facts(self, measured: Sequence[Measured]) -> dict[str, Any]:
        """Describes model and samples in words."""
        arguments = self.arguments
        counts = list(dict.fromkeys(str(each.samples) for each in measured))
        number = counts[0] if len(counts) == 1 else ", ".join(str(each.samples) for each in measured)
        lengths = ", ".join(str(length) for length in self.sizes)
        name = (
            Path(arguments.model).name if arguments.model else f"the 6-layer MiniLM BERT of the PyPI package {PACKAGE}"
        )
        chosen = {"settings chosen on": Path(arguments.choose_on).name} if arguments.choose_on else {}
        return {
            "model": f"{name} ({type(self.model).__name__})",
            "text": f"{number} samples of {lengths} tokens of {Path(arguments.text).name}",
            **chosen,
            "positions": whole.positions(self.model, self.sizes[-1], arguments.position_period),
        }

    def _ids(self, text: str, size: int) -> Tensor:
        return samples(text, self.tokenizer, size, self.arguments.samples, self.arguments.seed)
