"""The sketches that forms of landmark attention are chosen by, and the program that compares them."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from favor.eval.forms import __main__ as forms
from favor.eval.forms.form import CAUSAL, ENCODER, SECTION, attend, causal_parts, directions, encoder_parts, take

LENGTH = 512


@pytest.fixture
def heads():
    torch.manual_seed(0)
    return torch.randn(3, 2, LENGTH, 8).unbind(0)


@pytest.mark.parametrize("order", ["position", "split", "centres"])
@pytest.mark.parametrize("form", [ENCODER, CAUSAL, replace(CAUSAL, heads=True, page=4, own_page=4)])
def test_with_all_keys_a_form_is_softmax_attention(form, order, heads):
    form = replace(form, shared=LENGTH, order=order)
    is_causal = form.block == CAUSAL.block
    parts_of, first = (causal_parts, SECTION) if is_causal else (encoder_parts, 0)
    exact = scaled_dot_product_attention(*heads, is_causal=is_causal, scale=0.5)
    parts = list(parts_of(form, *heads, 0.5, range(first, LENGTH, form.block)))
    assert torch.cat([part.places for part in parts], 1).sort(1).values.tolist() == [list(range(first, LENGTH))] * 2
    for part in parts:
        output, read = attend(form, part, 0.5, 2)
        torch.testing.assert_close(output, take(exact, part.places))
        assert read == (SECTION if is_causal else LENGTH)


@pytest.mark.parametrize(
    "form", [replace(CAUSAL, union=True), replace(CAUSAL, page=4, own_page=8, order="split", bins=True)]
)
def test_causal_forms_do_not_see_later_tokens(form, heads):
    """The directions come from the first 2,048 tokens, for all queries; here all directions are searched."""
    form = replace(form, shared=32, own=8)
    last = LENGTH - form.block
    changed = [torch.cat([x[:, :last], x[:, last:] + 1], 1) for x in heads]
    (part,), (other,) = (list(causal_parts(form, *found, 0.5, [last - form.block])) for found in (heads, changed))
    found, expected = (
        attend(form, each._replace(searched=each.query, found=each.key), 0.5, 2)[0] for each in (part, other)
    )
    assert torch.equal(found, expected)


def test_directions_keep_most_of_the_products(heads):
    query, key, _ = heads
    strong = torch.tensor([4.0, 3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]) @ torch.linalg.qr(torch.randn(8, 8)).Q.diag_embed()[0]
    for rank, error in ((1, 1e-5), (4, 0.1)):
        of_queries, of_keys = directions(query * strong, key, rank)
        found, exact = (query * strong @ of_queries) @ (key @ of_keys).mT, (query * strong) @ key.mT
        assert ((found - exact).norm() / exact.norm()) < error


def test_a_whole_run(bert_folder, decoder_folder, text, tmp_path):
    common = ["--text", str(text), "--lengths", "1024", "--blocks", "1", "--output_dir", str(tmp_path)]
    assert forms.main(["--model_name_or_path", str(bert_folder), *common, "--name", "encoder"]) == 0
    assert forms.main(["--model_name_or_path", str(decoder_folder), *common, "--samples", "1"]) == 0
    found = json.loads((tmp_path / "forms.json").read_text())["lengths"]["1024"]
    assert found["perplexities"].keys() == {forms.EXACT, *forms.MEASURED, forms.TODAY}
    assert all(0 < loss < 1e4 for loss in found["perplexities"].values())
    for name, rows in (("forms", forms.CAUSAL_FORMS), ("encoder", forms.ENCODER_FORMS)):
        written = (tmp_path / f"{name}.md").read_text()
        assert all(f"| {row} | 0." in written for row in [*rows, forms.TODAY])


def test_what_cannot_be_measured(bert_folder, text, capsys):
    with pytest.raises(ValueError, match="has no perplexity"):
        forms.main(["--model_name_or_path", str(bert_folder), "--text", str(text), "--samples", "1"])
    with pytest.raises(SystemExit):
        forms.main(["--text", str(text), "--lengths", "1000"])
    assert "powers of two of at least 1024, got [1000]" in capsys.readouterr().err
