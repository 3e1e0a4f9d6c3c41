r"""Continue the training of a causal language model, such as LLaMA, with exact or FAVOR attention.

    accelerate launch -m favor.train.clm --model_name_or_path DIR --train_file book.txt --max_length 1024 \
        --attn_implementation favor# --features landmark --exact_below 0 --output_dir out/adapted

A decoder that was trained with softmax attention adapts in this way to the estimate of it. Features other than
landmarks need parameters that do not come from the sequence itself: run `favor.calibrate` on the model first and
save it. Text is cut into samples of equal length, and every token of a sample is predicted from
earlier tokens. The output folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, PreTrainedModel

from favor.integrations.layer import attention_modules, decodes_or_is_causal
from favor.train.text import language
from favor.train.text.samples import Plain


def check_causal(model: PreTrainedModel) -> None:
    """Raises ValueError for a model with a layer that sees later tokens."""
    if not all(decodes_or_is_causal(module) for module in attention_modules(model).values()):
        raise ValueError(
            f"{type(model).__name__} has layers that see later tokens, so it can copy them and is no causal language "
            "model: favor.train.mlm trains such models"
        )


OBJECTIVE = language.Objective(
    name="clm",
    auto_class=AutoModelForCausalLM,
    shift=1,
    samples=lambda ids, tokenizer, seed: Plain(ids, labels=True),
    check=check_causal,
)


parse_arguments, main, cli = language.programs(OBJECTIVE, __doc__)

if __name__ == "__main__":
    cli()
