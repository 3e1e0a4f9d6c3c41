"""Masks: what the mask function records, and what is read from masks made elsewhere.

What the backends refuse, and packed batches from transformers' flattening collator.
"""

import pytest
import torch
import transformers as hf
from architectures import BERT, COMMON, LLAMA, padding_mask, tokens
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from favor.integrations.backend import favor_attention_forward
from favor.integrations.masks import favor_mask, visibility

PADDING = padding_mask().bool()


def module(is_causal):
    attention = torch.nn.Module()
    attention.config, attention.is_causal = hf.BertConfig(), is_causal
    return attention


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize(
    ("function", "local", "causal", "reach"),
    [
        (causal_mask_function, None, True, None),
        (bidirectional_mask_function, None, False, None),
        (sliding_window_causal_mask_function(5), 5, True, 4),
        (sliding_window_bidirectional_mask_function(5), 5, False, 5),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_says_what_is_seen_whatever_the_module_claims(function, local, causal, reach, claims, padded):
    mask = favor_mask(3, 24, 24, mask_function=function, local_size=local, attention_mask=PADDING if padded else None)
    assert mask.untyped_storage().nbytes() <= 3 * 24  # no square
    sees = visibility(module(claims), mask, claims, (3, 24, 24), sliding_window=99)
    assert (sees.causal, sees.reach, sees.dense) == (causal, reach, False)
    assert torch.equal(sees.padding, PADDING) if padded else sees.padding is None
    # The record is what transformers' own mask shows, pair by pair.
    every = hf.masking_utils.sdpa_mask(
        3, 24, 24, mask_function=function, attention_mask=PADDING, allow_is_causal_skip=False
    )
    distance = torch.arange(24)[:, None] - torch.arange(24)
    shown = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    shown = shown if reach is None else shown & (distance.abs() <= reach)
    assert torch.equal(every, shown & PADDING[:, None, None, :])


def test_other_patterns_show_every_pair_in_local_masks_and_are_refused_in_global_ones():
    function = chunked_causal_mask_function(6, torch.zeros(3, dtype=torch.int64))
    mask = favor_mask(3, 24, 24, mask_function=function, local_size=6, attention_mask=PADDING)
    chunk = torch.arange(24) // 6
    shown = (chunk[:, None] == chunk) & torch.ones(24, 24, dtype=torch.bool).tril()
    assert torch.equal(mask, shown & PADDING[:, None, None, :])
    assert visibility(module(True), mask, None, (3, 24, 24)).dense
    with pytest.raises(ValueError, match="prefix or blocks"):
        favor_mask(3, 24, 24, mask_function=and_masks(causal_mask_function, lambda batch, head, q, k: k > 3))


EVERY = PADDING[:, None, None, :].expand(3, 1, 24, 24)
FORMS = {
    "materialised": EVERY.contiguous(),
    "additive": torch.zeros(3, 1, 24, 24).masked_fill(~EVERY, torch.finfo(torch.float32).min),
    "additive -inf": torch.zeros(3, 1, 24, 24).masked_fill(~EVERY, -torch.inf),
    "queries masked too": EVERY & PADDING[:, None, :, None],
    "one row": EVERY[:, :, :1],
    "triangle": EVERY[:, :, :5] & torch.ones(5, 24, dtype=torch.bool).tril(19),
}


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_padding_and_causality_are_read_from_masks_of_any_make(form, claims):
    queries = 5 if form == "triangle" else 24
    sees = visibility(module(claims), FORMS[form], None, (3, queries, 24))
    assert torch.equal(sees.padding, PADDING)
    assert sees.causal == (form == "triangle")


@pytest.mark.parametrize("claims", [False, True])
def test_masks_without_a_record_leave_causality_to_the_module(claims):
    for mask in (PADDING, PADDING[:, None, None, :].expand(3, 1, 24, 24), None):
        sees = visibility(module(claims), mask, None, (3, 24, 24))
        assert sees.causal == claims
        assert sees.padding is None if mask is None else torch.equal(sees.padding, PADDING)
        assert visibility(module(claims), mask, not claims, (3, 24, 24)).causal != claims
    encoder = module(claims)
    encoder.is_decoder = False  # which is right where a layer claims to be causal
    assert not visibility(encoder, None, None, (3, 24, 24)).causal


WRONG = [torch.ones(shape) for shape in ((3, 4, 24, 24), (3, 24, 24), (3, 7))]


@pytest.mark.parametrize("mask", [*WRONG, torch.full((3, 1, 24, 24), -0.5), torch.ones(3, 1, 24, 24).triu()])
def test_other_masks_are_refused(mask):
    with pytest.raises(ValueError, match=r"each pair|attention_mask must be"):
        visibility(module(False), mask, None, (3, 24, 24))


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
