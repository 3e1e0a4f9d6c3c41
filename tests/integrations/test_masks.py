"""Masks: what the mask function records, and what is read from masks made elsewhere."""

import pytest
import torch
import transformers as hf
from architectures import padding_mask
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

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
