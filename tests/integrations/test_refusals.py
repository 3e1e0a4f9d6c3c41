"""What the backends refuse, and packed batches from transformers' flattening collator."""

import pytest
import torch
import transformers as hf
from architectures import BERT, COMMON, LLAMA, tokens

from favor.integrations.backend import favor_attention_forward

T5 = {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 32, "vocab_size": 40}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
REFUSED = {
    "t5": (hf.T5EncoderModel, hf.T5Config(**T5), "position bias .*argument position_bias"),
    "gemma2": (hf.Gemma2Model, hf.Gemma2Config(**GROUPED), "soft-capped logits"),
    "gpt-oss": (hf.GptOssModel, hf.GptOssConfig(**GROUPED, num_local_experts=2), "attention sinks"),
}
IDS = [torch.arange(1, 1 + n).tolist() for n in (5, 17, 1, 9)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name, padded):
    model_class, config, message = REFUSED[name]
    model = model_class._from_config(config, attn_implementation="favor#").eval()
    with pytest.raises(ValueError, match=message):
        model(**tokens(padded))


def flattened(**options):
    collator = hf.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": ids} for ids in IDS])
    batch.pop("labels")
    return batch


def static_cache():
    model = LLAMA.build("favor+", exact_below=0)
    return model(**tokens(False), past_key_values=hf.StaticCache(config=model.config, max_cache_len=40))


def one_layer(*without, **options):
    module = BERT.build("favor+", exact_below=0).encoder.layer[0].attention.self
    for name in without:
        delattr(module, name)
    return favor_attention_forward("favor+", module, *torch.randn(3, 1, 4, 5, 8), None, **options)


def packed(build, flash=True, without=(), **more):
    batch = flattened(return_flash_attn_kwargs=flash) | more
    return build("favor+", exact_below=0)(**{name: tensor for name, tensor in batch.items() if name not in without})


PAIRWISE = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)) > 0.3
PADDED = (torch.arange(32) < 29).long()[None]
CALLS = [
    (static_cache, "static cache"),
    (lambda: one_layer(output_attentions=True), "never forms the attention matrix"),
    (lambda: one_layer("is_causal"), "set its attribute is_causal"),
    (lambda: BERT.build("favor+", exact_below=0)(**tokens(False), attention_mask=PAIRWISE), "bias for each pair"),
    # With a cache transformers itself sees one sequence.
    (lambda: packed(LLAMA.build, flash=False, use_cache=False), r"packed .*return_flash_attn_kwargs=True"),
    (lambda: packed(LLAMA.build, without=["cu_seq_lens_k"]), "cu_seqlens_q and cu_seqlens_k go together"),
    (lambda: packed(BERT.build, attention_mask=PADDED), "do not pass attention_mask"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_calls_that_cannot_be_right_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("architecture", [BERT, LLAMA], ids=lambda a: a.name)
@pytest.mark.parametrize("backend", ["favor+", "favor#", "favor_elu"])
@pytest.mark.parametrize("exact_below", [0, 9], ids=["estimated", "by length"])
@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
def test_packed_models_give_what_each_sequence_gives_alone(architecture, backend, exact_below):
    model = architecture.build(backend, num_features=16, exact_below=exact_below)
    found = model(**flattened(return_flash_attn_kwargs=True)).last_hidden_state[0]
    alone = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in IDS]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)
