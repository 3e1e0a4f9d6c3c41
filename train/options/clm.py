r"""Continue the training of a causal language model, such as LLaMA, with exact or FAVOR attention.

    accelerate launch -m favor.train.clm --model_name_or_path DIR --train_file book.txt --max_length 1024 \
        --attn_implementation favor# --features landmark --exact_below 0 --output_dir out/adapted

A decoder that was trained with softmax attention adapts in this way to the estimate of it. Features other than
landmarks need parameters that do not come from the sequence itself: run `favor.calibrate` on the model first, and add
`--statistics calibrated`. Text is cut into samples of equal length, and every token of a sample is predicted from
earlier tokens. The output folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

from collections.abc import Sequence

from favor.train.text.arguments import Arguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-clm")
