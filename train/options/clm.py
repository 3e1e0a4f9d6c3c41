r"""Go on with the training of a causal language model (LLaMA and its like), with exact or FAVOR attention.

    accelerate launch -m favor.train.clm --model_name_or_path DIR --train_file book.txt --max_length 1024 \
        --attn_implementation favor# --features landmark --window 128 --exact_below 0 --output_dir out/adapted

A decoder that was trained with softmax attention adapts to its estimate this way. Features other than landmarks need
parameters that do not come from the sequence itself: `favor.calibrate` it first, and add `--statistics calibrated`.
Text is cut into samples of equal length, and every token of a sample is predicted from those before it. The output
folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

from collections.abc import Sequence

from favor.train.text.arguments import Arguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Arguments of the program; ends it for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-clm")
