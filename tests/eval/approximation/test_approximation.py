"""The report on approximation errors: numbers computed again from their definition, and what the files hold."""

import json
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import favor
from favor.eval.approximation import __main__ as approximation
from favor.eval.approximation import model as approximation_model
from favor.eval.approximation.heads import LOCAL, MEAN, HeadErrors, Variant, mean_of_values, window_alone
from favor.features.moments import attention_received
from favor.integrations.adapt.observe import Observation


class Encoder(torch.nn.Module):
    """Stands for an attention module that is not a decoder's."""

    config = None


def seen(length=12, is_causal=False, padding=None, groups=2):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, length, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(length, length, dtype=torch.bool)
    mask = mask.tril() if is_causal else mask
    mask = mask[None, None] if padding is None else mask & padding[:, None, None]
    out = scaled_dot_product_attention(query, key, value, mask, scale=0.6, enable_gqa=True)
    return Observation(0, Encoder(), query, key, value, padding, is_causal, 0.6, out)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_baselines_are_their_definition(is_causal, padded):
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, 9:] = False
    o = seen(is_causal=is_causal, padding=padding if padded else None)
    mean, local = mean_of_values(o), window_alone(o, 5)
    for b in range(2):
        for h in range(4):
            for i in range(12 - 3 * padded * b):
                keys = [j for j in range(12) if not (padded and not padding[b, j]) and not (is_causal and j > i)]
                values = o.value[b, h // 2]
                torch.testing.assert_close(mean[b, h, i], values[keys].mean(0))
                near = [j for j in keys if j // 5 == i // 5]
                weights = (0.6 * o.key[b, h // 2, near] @ o.query[b, h, i]).softmax(0)
                torch.testing.assert_close(local[b, h, i], weights @ values[near])


def test_errors_of_heads():
    """Zero where a window covers the sequence; for favor+ the norm of the difference, written out."""
    o = seen()
    variants = [Variant(MEAN, None, 0, 0), Variant("favor#", "wderf", 8, 12), Variant("favor+", None, 8, 0)]
    errors = HeadErrors(variants, seed=3)
    errors(o)
    assert max(row.max() for row in errors.errors[variants[1]][0]) < 1e-6
    out = favor.favor_attention(o.query, o.key, o.value, features="pos", num_features=8, scale=0.6, seed=3)
    for b in range(2):
        for h in range(4):
            expected = (out - o.output)[b, h].norm() / o.output[b, h].norm()
            torch.testing.assert_close(errors.errors[variants[2]][0][b][h], expected)
    norms = 0.6 * o.query.square().sum(-1).mean(-1)
    torch.testing.assert_close(torch.stack(errors.diagnostics["|x|"][0]).square(), norms)


def test_rho_is_the_mean_over_pairs_of_the_log_second_moment():
    o = seen(groups=1)
    errors = HeadErrors([])
    errors(o)
    family = favor.features.get("wderf")
    for b in range(2):
        x, y = (0.6**0.5 * t[b, 0] for t in (o.query, o.key))
        moments = family.moments(x, y)
        params = family.fit_moments(moments)
        z = params.map_queries(x)[:, None] + params.map_keys(y)[None]
        # Pairs have the weight that the statistics give to their keys.
        received = attention_received(x, y, None, None, 16, scale=1.0, is_causal=False)
        expected = (params.log_relative_second_moment(z.flatten(0, 1)).view(12, 12) * received).sum(1).mean()
        torch.testing.assert_close(errors.diagnostics["rho"][0][b][0], expected)


def test_report_of_an_encoder(bert_folder, glue_folder, text, tmp_path):
    options = ["--length", "24", "--samples", "2", "--num_features", "8", "--windows", "0", "24"]
    more = ["--backends", "favor+", "favor#:wderf", "--data_dir", str(glue_folder), "--results", str(tmp_path)]
    assert approximation.main([str(bert_folder), "--text", str(text), *options, *more]) == 0
    found = json.loads((tmp_path / "approximation.json").read_text())
    by_name = {(v["backend"], v["features"], v["window"]): v for v in found["variants"]}
    assert len(by_name) == 6
    assert by_name[("favor#", "wderf", 24)]["error"] < 1e-5
    assert by_name[("favor#", "wderf", 24)]["score"] == pytest.approx(1.0, abs=1e-6)
    assert by_name[("favor+", None, 0)]["error"] > 0.05
    assert by_name[("favor+", None, 0)]["score"] < 1
    assert by_name[(LOCAL, None, 24)]["error"] < 1e-5
    assert by_name[(MEAN, None, 0)]["score"] is None
    assert by_name[("favor+", None, 24)]["sts"] is None
    assert -1 <= by_name[("favor+", None, 0)]["sts"] <= 1
    text_of = (tmp_path / "approximation.md").read_text()
    assert str(tmp_path) not in text_of
    assert "| `favor#:wderf` | 8 | 24 | 0.000 |" in text_of
    # A row for each attention layer, numbered as in the heat map.
    diagnostics = text_of.split("## Diagnostics by layer")[1].split("| layer |")[1].splitlines()[2:4]
    assert [row.split(" | ")[0] for row in diagnostics] == ["| 0", "| 1"]
    assert (tmp_path / "approximation.png").stat().st_size > 10_000


def test_perplexity_of_a_decoder(bert_folder, text, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=24)).eval()
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 24, (3, 16))
    assert approximation_model.measure_of(model) == "perplexity"
    losses = approximation_model.outputs(model, ids, None, 0)
    with torch.no_grad():
        log_p = model(ids).logits[:, :-1].log_softmax(-1)
    expected = -log_p.gather(2, ids[:, 1:, None]).mean()
    assert approximation_model.score("perplexity", losses, losses) == pytest.approx(math.exp(expected), rel=1e-5)
    switched = approximation_model.switch(model, Variant("favor+", None, 4, 16), 0)
    torch.testing.assert_close(approximation_model.outputs(switched, ids, None, 0), losses, rtol=1e-5, atol=1e-5)
