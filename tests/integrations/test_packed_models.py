"""Packed batches from transformers' flattening collator."""

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES

BERT, LLAMA = (next(a for a in ARCHITECTURES if a.name == name) for name in ("bert", "llama"))
IDS = [torch.arange(1, 1 + n).tolist() for n in (5, 17, 1, 9)]


def flattened(**options):
    collator = hf.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": ids} for ids in IDS])
    batch.pop("labels")
    return batch


@pytest.mark.parametrize("architecture", [BERT, LLAMA], ids=lambda a: a.name)
@pytest.mark.parametrize("backend", ["favor+", "favor#", "favor_elu"])
@pytest.mark.parametrize("exact_below", [0, 9], ids=["estimated", "by length"])
@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
def test_packed_models_give_what_each_sequence_gives_alone(architecture, backend, exact_below):
    model = architecture.build(backend, num_features=16, exact_below=exact_below)
    packed = model(**flattened(return_flash_attn_kwargs=True)).last_hidden_state[0]
    alone = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in IDS]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_packed_decoders_without_lengths_are_refused():
    model = LLAMA.build("favor+", exact_below=0)
    with pytest.raises(ValueError, match=r"packed sequences .*return_flash_attn_kwargs=True"):
        model(**flattened(), use_cache=False)  # with a cache transformers itself sees one sequence
    batch = flattened(return_flash_attn_kwargs=True)
    del batch["cu_seq_lens_k"]
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k go together"):
        model(**batch)


def test_packed_batches_with_padding_are_refused():
    model = BERT.build("favor+", exact_below=0)
    mask = torch.ones(1, 32, dtype=torch.long)
    mask[:, -3:] = 0
    with pytest.raises(ValueError, match="do not pass attention_mask"):
        model(**flattened(return_flash_attn_kwargs=True), attention_mask=mask)
