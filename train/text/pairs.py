"""Samples of two texts, made from samples of one text, as tasks on pairs of sentences have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that is not predicted


class Pairs:
    """Makes two texts of some samples: the second begins inside the first or right after it, and shares words with it.

    Words that stand in both texts are what a model compares, and what heads that look at equal words look at.

    Args:
        tokenizer: that of the model.
        before, after: number of special tokens before and after one text.
        probability: of two texts in a sample.

    Raises:
        ValueError: if the tokenizer sets no special tokens between two texts.
    """

    def __init__(self, tokenizer: Any, before: int, after: int, probability: float) -> None:
        self.before, self.after, self.probability = before, after, probability
        if not probability:
            return
        word = tokenizer("a", add_special_tokens=False)["input_ids"][0]
        joined = {name: torch.tensor(own) for name, own in tokenizer("a", "a").items()}
        template = joined["input_ids"]
        # What stands around the two texts, and one token in the place of each.
        self.templates = {"input_ids": template, "labels": torch.full_like(template, IGNORED)}
        self.types = joined.get("token_type_ids")
        places = (template == word).nonzero()[:, 0].tolist()
        if len(places) != 2 or places[1] == places[0] + 1:
            raise ValueError(
                f"pair_probability needs a tokenizer that sets special tokens between two texts, which "
                f"{type(tokenizer).__name__} does not: leave it out"
            )
        self.places = places

    def __call__(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Gives a batch `[B, n]` of which some samples are pairs of the same number of tokens.

        Args:
            batch: `input_ids`, and `labels` if there are any; its other arguments are kept.
            generator: draws which samples, and where their texts begin and end.
        """
        if not self.probability:
            return batch
        made = {name: own.clone() for name, own in batch.items()}
        if self.types is not None:
            made["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        length = batch["input_ids"].shape[1]
        words = length - len(self.templates["input_ids"]) + 2  # of both texts
        for row in range(len(batch["input_ids"])):
            if words < 4 or torch.rand((), generator=generator) >= self.probability:
                continue
            first = int(torch.randint(words // 4, words - words // 4 + 1, (), generator=generator))
            start = int(torch.randint(first + 1, (), generator=generator))
            for name in self.templates.keys() & batch.keys():
                text = batch[name][row, self.before : length - self.after]
                made[name][row] = self._join(text[:first], text[start : start + words - first], self.templates[name])
            if self.types is not None:
                kinds = (self.types[self.places[0]].expand(first), self.types[self.places[1]].expand(words - first))
                made["token_type_ids"][row] = self._join(*kinds, self.types)
        return made

    def _join(self, first: Tensor, second: Tensor, special: Tensor) -> Tensor:
        """Puts the two texts in the places of the words of the template."""
        a, b = self.places
        special = special.to(first)
        return torch.cat([special[:a], first, special[a + 1 : b], second, special[b + 1 :]])
