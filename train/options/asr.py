r"""Train a Conformer to recognise speech, by CTC, Transducer or both, or a Whisper, with exact or FAVOR attention.

    accelerate launch -m favor.train.asr --data_dir LibriSpeech --train_split train-clean-100 --eval_splits dev-clean \
        --preset small --architecture ctc --attn_implementation favor# --num_features 128 --output_dir out/asr

With `--model_name_or_path` and the folder of a Whisper, that model is fine-tuned; a FAVOR backend then replaces the
attention of its encoder alone. With `--architecture ctc` its encoder gets a new CTC head instead. Without `--data_dir`
the corpus comes from the hub (`openslr/librispeech_asr`). The output folder gets the model (the average of the weights,
with `--ema_decay`), its processor and `all_results.json`. `accelerate launch` decides whether the program runs on a
CPU, one GPU or several.
"""

from __future__ import annotations

from collections.abc import Sequence

from favor.train.speech.arguments import Arguments


def parse_arguments(words: Sequence[str] | None) -> Arguments:
    """Parses the arguments; ends the program for bad ones, raises ValueError for values that cannot be used."""
    return Arguments.parse(words, __doc__, "favor-asr")
