"""The sketches that forms of landmark attention are chosen by, and the program that compares them."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from favor.eval.forms import __main__ as forms
from favor.eval.forms.form import (
    CAUSAL,
    SECTION,
    alike,
    attend,
    causal_parts,
    coordinates,
    encoder_parts,
    take,
)

LENGTH = 512


@pytest.fixture
def heads():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, LENGTH, 8).unbind(0)
    return query, key[:1], value[:1]


def outputs(form, heads):
    """Output and number of read keys of all blocks, and exact attention, in the order of the form."""
    is_causal = form.block == CAUSAL.block
    parts_of, first = (causal_parts, SECTION) if is_causal else (encoder_parts, 0)
    parts = list(parts_of(form, *heads, range(first, LENGTH, form.block)))
    places = torch.cat([part.places for part in parts], 1)
    assert places.sort(1).values.tolist() == [list(range(first, LENGTH))] * 2
    found, read = zip(*[attend(form, part, 0.5) for part in parts], strict=True)
    exact = scaled_dot_product_attention(*(x.expand(2, -1, -1) for x in heads), is_causal=is_causal, scale=0.5)
    return torch.cat(found, 1), read, take(exact, places)


EVERY = [*forms.ENCODER_FORMS.values(), *forms.CAUSAL_FORMS.values()]


@pytest.mark.parametrize("form", EVERY)
def test_with_all_keys_a_form_is_softmax_attention(form, heads):
    found, read, exact = outputs(replace(form, shared=LENGTH), heads)
    torch.testing.assert_close(found, exact)
    assert set(read) == {SECTION if form.block == CAUSAL.block else LENGTH}


@pytest.mark.parametrize("form", [replace(form, shared=32, own=0, is_sorted=False) for form in EVERY])
def test_means_count_as_often_as_keys_that_are_left(form, heads):
    """Equal keys and equal values, in each section or node, have equal means."""
    run = SECTION if form.block == CAUSAL.block else 2
    key, value = (x[:, ::run].repeat_interleave(run, 1) for x in heads[1:])
    found, read, exact = outputs(form, (heads[0], key, value))
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    assert 32 <= max(read) <= 36


@pytest.mark.parametrize("form", forms.CAUSAL_FORMS.values())
def test_causal_forms_do_not_see_later_tokens(form, heads):
    form, start, later = replace(form, shared=min(form.shared, 32), own=min(form.own, 8)), SECTION + 64, SECTION + 74
    changed = [torch.cat([x[:, :later], x[:, later:] + 1], 1) for x in heads]
    found, expected = (attend(form, next(causal_parts(form, *each, [start])), 0.5)[0] for each in (changed, heads))
    torch.testing.assert_close(found[:, :10], expected[:, :10])
    assert not torch.allclose(found[:, 10:], expected[:, 10:])


@pytest.mark.parametrize("shared", [False, True])
def test_coordinates_are_those_with_the_largest_products(shared, heads):
    query, key, _ = heads
    sizes = torch.tensor([[1.0, 1, 5, 1, 1, 1, 1, 1], [1.0, 9, 1, 1, 1, 1, 1, 1]])[:, None]
    marks = coordinates(replace(CAUSAL, rank=8, heads=shared), query * sizes, key + 100 * torch.eye(8)[5])
    assert marks.nonzero()[:, 2].tolist() == ([1, 1] if shared else [2, 1])


def test_alike_rows_become_neighbours(heads):
    """Rows of 8 kinds, in a random order: splits at medians cut some kinds in two."""
    kinds = torch.randn(8, 8)[torch.randint(8, (2, LENGTH))]
    found = take(kinds, alike(kinds + 1e-4 * torch.randn_like(kinds), heads[0]))
    assert ((found.diff(dim=1).abs().sum(-1) > 0).sum(1) < 32).all()


def test_a_whole_run(bert_folder, decoder_folder, text, tmp_path):
    common = ["--text", str(text), "--lengths", "1024", "--blocks", "1", "--output_dir", str(tmp_path)]
    assert forms.main(["--model_name_or_path", str(bert_folder), *common, "--name", "encoder"]) == 0
    assert forms.main(["--model_name_or_path", str(decoder_folder), *common, "--samples", "1"]) == 0
    found = json.loads((tmp_path / "forms.json").read_text())["lengths"]["1024"]
    assert found["perplexities"].keys() == {forms.EXACT, *forms.MEASURED, forms.BACKEND}
    assert all(0 < loss < 1e4 for loss in found["perplexities"].values())
    for name, rows in (("forms", forms.CAUSAL_FORMS), ("encoder", forms.ENCODER_FORMS)):
        written = (tmp_path / f"{name}.md").read_text()
        assert all(f"| {row} | 0." in written for row in [*rows, forms.BACKEND])


def test_what_cannot_be_measured(bert_folder, text, capsys):
    with pytest.raises(ValueError, match="has no perplexity"):
        forms.main(["--model_name_or_path", str(bert_folder), "--text", str(text), "--samples", "1"])
    with pytest.raises(SystemExit):
        forms.main(["--text", str(text), "--lengths", "1000"])
    assert "powers of two of at least 1024, got [1000]" in capsys.readouterr().err
