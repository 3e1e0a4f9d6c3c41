r"""Continue the pre-training of a masked language model, with exact or FAVOR attention.

    accelerate launch -m favor.train.mlm --model_name_or_path bert-base-uncased --train_file book.txt \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/adapted

A model that was trained with softmax attention adapts in this way to the estimate of it before it is fine-tuned. In the
papers, models are pre-trained and fine-tuned with the same attention. Text is cut into samples of equal length; other
tokens are masked in every epoch. `--untie_head` gives the output layer weights of its own, which `--head_optimizer
softmax_bound` needs. The output folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from favor.train.common.arguments import option
from favor.train.text import arguments


@dataclass(kw_only=True)
class MaskingArguments(arguments.TextArguments):
    """How the text is masked."""

    mlm_probability: float = option(
        0.15, "Fraction of the tokens to predict; 80 % of these are masked, 10 % are replaced."
    )

    def __post_init__(self) -> None:
        """Checks the numbers; raises ValueError."""
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"mlm_probability must be between 0 and 1, got {self.mlm_probability}")


@dataclass
class Arguments(arguments.Arguments):
    """All arguments of a run."""

    text: MaskingArguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-mlm")
