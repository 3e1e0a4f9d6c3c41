r"""Go on with the pre-training of a masked language model, with exact or FAVOR attention.

    accelerate launch -m favor.train.mlm --model_name_or_path bert-base-uncased --train_file book.txt \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/adapted

A model that was trained with softmax attention adapts to its estimate this way before it is fine-tuned, as the papers'
models were pre-trained with the attention they are fine-tuned with. Text is cut into samples of equal length; which of
their tokens are masked changes with every epoch. `--head_optimizer softmax_bound` and `--untie_head` give the output
layer weights of its own. The output folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from favor.train.common.arguments import option
from favor.train.text import arguments


@dataclass(kw_only=True)
class MaskingArguments(arguments.TextArguments):
    """How the text is masked."""

    mlm_probability: float = option(0.15, "Part of the tokens to predict; of these 80 % masked, 10 % replaced.")

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
    """Arguments of the program; ends it for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-mlm")
