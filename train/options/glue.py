r"""Fine-tune a pretrained model on a GLUE task, with exact or FAVOR attention.

    accelerate launch -m favor.train.glue --model_name_or_path bert-base-uncased --task_name mrpc \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/mrpc

Without `--data_dir` the task comes from the hub (`nyu-mll/glue`). The output folder gets the model of the last
step, its tokenizer, `all_results.json` and a model card. With `--seeds` each seed has a folder of its own, and the
output folder gets mean and standard deviation. `accelerate launch` decides whether the program runs on a CPU, one GPU
or several.
"""

from __future__ import annotations

from collections.abc import Sequence

from favor.train.common.arguments import Arguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-glue")
