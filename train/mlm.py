r"""Continue the pre-training of a masked language model, with exact or FAVOR attention.

    accelerate launch -m favor.train.mlm --model_name_or_path bert-base-uncased --train_file book.txt \
        --attn_implementation favor# --num_features 128 --exact_below 0 --output_dir out/adapted

A model that was trained with softmax attention adapts in this way to the estimate of it before it is fine-tuned. In the
papers, models are pre-trained and fine-tuned with the same attention. Text is cut into samples of equal length; other
tokens are masked in every epoch. `--untie_head` gives the output layer weights of its own, which `--head_optimizer
softmax_bound` needs. The output folder gets the model, its tokenizer and `all_results.json`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

from favor.train.common.loop import mix
from favor.train.text import language
from favor.train.text.samples import Plain
from favor.train.text.stream import Stream

# Fraction of the tokens to predict; 80 % of these are masked, 10 % are replaced.
PROBABILITY = 0.15


class MaskedTexts(Plain):
    """A data set of samples `[n, length]` with some tokens masked, at least one per sample, and no special ones.

    Item `epoch * length + index` is sample `index` with the masks of that epoch, drawn by the seed. Raises ValueError
    if the tokenizer has no token for masking.
    """

    def __init__(self, ids: Tensor | Stream, tokenizer: Any, seed: int) -> None:
        super().__init__(ids)
        self.seed = seed
        self.masker = DataCollatorForLanguageModeling(tokenizer, mlm_probability=PROBABILITY)

    def __getitem__(self, visit: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(mix(self.seed, visit))
        sample, self.masker.generator = self.ids[visit % len(self.ids)], generator
        ids, labels = (rows[0] for rows in self.masker.torch_mask_tokens(sample.unsqueeze(0).clone()))
        if bool((labels == -100).all()):  # a short sample; without a label the loss of a batch would be 0 / 0
            special = self.masker.tokenizer.get_special_tokens_mask(sample.tolist(), already_has_special_tokens=True)
            places = (torch.tensor(special) == 0).nonzero()[:, 0]
            place = places[torch.randint(len(places), (), generator=generator)]
            ids[place], labels[place] = self.masker.tokenizer.mask_token_id, sample[place]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


OBJECTIVE = language.Objective(
    name="mlm",
    auto_class=AutoModelForMaskedLM,
    shift=0,
    samples=MaskedTexts,
    check=lambda model: None,
)


parse_arguments, main, cli = language.programs(OBJECTIVE, __doc__)

if __name__ == "__main__":
    cli()
