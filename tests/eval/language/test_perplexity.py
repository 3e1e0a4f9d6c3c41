"""Perplexity: numbers beside transformers' own loss, and a run that goes on where it was stopped."""

import math

import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from favor.eval.language import perplexity
from favor.train.text.samples import samples


@pytest.fixture
def words(folder, novel_file):
    sizes = ["--lengths", "64", "200", "--samples", "3"]
    return [folder, "--texts", novel_file, *sizes, "--backends", "exact", "favor+:num_features=8"]


@pytest.mark.parametrize("length", [2, 7, 8, 50])
def test_nats_are_the_loss_of_transformers(llama, tokenizer, length, monkeypatch):
    monkeypatch.setattr(perplexity, "SLICE", 7)
    ids = torch.randint(len(tokenizer), (1, length), generator=torch.Generator().manual_seed(0))
    nats = perplexity.token_nats(llama, ids)
    assert nats.shape == (length - 1,)
    with torch.no_grad():
        assert nats.mean().item() == pytest.approx(llama(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_model_that_changes_its_logits_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = CohereForCausalLM(CohereConfig(vocab_size=50, logit_scale=0.3, **sizes)).eval()
    with pytest.raises(ValueError, match="CohereForCausalLM changes them"):
        perplexity.token_nats(model, torch.randint(50, (1, 9)))


def test_the_table_holds_perplexities_of_the_whole_and_of_the_second_half(words, llama, tokenizer, novel_file, ran):
    cells = ran(perplexity, *words)[0]["cells"]
    assert [(cell["length"], cell["variant"]) for cell in cells] == [
        (length, variant) for length in (64, 200) for variant in ("exact", "favor+:num_features=8")
    ]
    ids = samples(novel_file, tokenizer, 200, 3)
    losses, late = [], []
    with torch.no_grad():
        for row in ids.split(1):
            labels = row.masked_fill(torch.arange(200) < 100, -100)
            losses.append(llama(row, labels=row).loss.item())
            late.append(llama(row, labels=labels).loss.item())
    exact = cells[2]
    assert exact["all"]["perplexity"] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert exact["second half"]["perplexity"] == pytest.approx(math.exp(sum(late) / 3), rel=1e-4)
    assert exact["all"]["difference"] == 0
    for part in ("all", "second half"):
        own = cells[3][part]
        assert own["difference"] == pytest.approx(own["perplexity"] / exact[part]["perplexity"] - 1) != 0


def test_the_error_is_that_of_paired_differences():
    nats, exact = np.array([3.0, 4.1, 5.3]), np.array([3.0, 4.0, 5.0])
    share, error = perplexity.difference(nats, exact)
    assert share == pytest.approx(math.exp(0.4 / 3) - 1)
    spread = math.sqrt(sum((d - 0.4 / 3) ** 2 for d in (0, 0.1, 0.3)) / 2)
    assert error == pytest.approx((1 + share) * spread / math.sqrt(3))


def test_a_run_that_was_stopped_goes_on_and_gives_the_same(words, monkeypatch, tmp_path, ran):
    first, records = ran(perplexity, *words)[0]["cells"], tmp_path / "out" / "x.jsonl"
    lines = records.read_text().splitlines()
    records.write_text("\n".join([*lines[:6], lines[6][:20]]))  # torn in the sixth result of 12
    measured, real = [], perplexity.token_nats
    monkeypatch.setattr(perplexity, "token_nats", lambda *given: measured.append(1) or real(*given))
    assert ran(perplexity, *words)[0]["cells"] == first
    assert len(measured) == 7
