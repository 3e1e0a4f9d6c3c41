"""The report on approximation errors: numbers computed again from their definition, and what the files hold."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import BertModel, LlamaConfig, LlamaForCausalLM, RobertaModel

import favor
from favor.eval.approximation import __main__ as approximation
from favor.eval.approximation import model as approximation_model
from favor.eval.approximation.variants import (
    LOCAL,
    MEAN,
    HeadErrors,
    Variant,
    mean_of_values,
    variants_of,
    window_alone,
)
from favor.integrations.adapt.observe import Observation
from favor.integrations.stored import update_choices


def run(folder, text, out, words):
    """Runs the program; returns its JSON and Markdown."""
    given = ["--text", str(text), "--output_dir", str(out), *words.split()]
    assert approximation.main([str(folder), *given]) == 0
    assert (out / "approximation.png").stat().st_size > 10_000
    return json.loads((out / "approximation.json").read_text()), (out / "approximation.md").read_text()


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


def test_perplexity_of_a_decoder(decoder_folder):
    model = LlamaForCausalLM.from_pretrained(decoder_folder).eval()
    ids = torch.randint(0, 24, (3, 16))
    assert approximation_model.measure_of(model) == "perplexity"
    losses = approximation_model.outputs(model, ids, None, 0)
    with torch.no_grad():
        log_p = model(ids).logits[:, :-1].log_softmax(-1)
    expected = -log_p.gather(2, ids[:, 1:, None]).mean()
    assert approximation_model.score("perplexity", losses, losses) == pytest.approx(math.exp(expected), rel=1e-5)
    switched = approximation_model.switch(model, Variant("favor+", None, 4, 16), 0)
    torch.testing.assert_close(approximation_model.outputs(switched, ids, None, 0), losses, rtol=1e-5, atol=1e-5)


def test_errors_on_a_sample_of_the_queries():
    """As on all queries, of the rows that were drawn, one of each equal stretch; zero where a window covers all."""
    o = seen(length=60)
    variants = [Variant(MEAN, None, 0, 0), Variant(LOCAL, None, 0, 7), Variant("favor+", None, 8, 0)]
    errors = HeadErrors([*variants, Variant("favor#", "wderf", 8, 60)], seed=3, query_samples=12)
    errors(o)
    assert max(row.max() for row in errors.errors[errors.variants[3]][0]) < 1e-6
    places = errors._places(60, o.query.device)
    assert (places // 5).tolist() == list(range(12))
    assert len(set((places % 5).tolist())) > 1
    whole = favor.favor_attention(o.query, o.key, o.value, features="pos", num_features=8, scale=0.6, seed=3)
    for variant, out in zip(variants, (mean_of_values(o), window_alone(o, 7), whole), strict=True):
        difference = (out - o.output)[:, :, places].flatten(2).norm(dim=-1)
        expected = difference / o.output[:, :, places].flatten(2).norm(dim=-1)
        torch.testing.assert_close(torch.stack(errors.errors[variant][0]), expected)


@pytest.mark.parametrize(("model_class", "first"), [(BertModel, 0), (RobertaModel, 3)])
def test_repeated_positions_are_those_of_a_model_with_a_longer_table(model_class, first):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": 20, "pad_token_id": max(first - 1, 0)}
    configs = (model_class.config_class(**sizes, max_position_embeddings=first + number) for number in (8, 24))
    small, large = (model_class(config).eval() for config in configs)
    weights = small.state_dict()
    name = "embeddings.position_embeddings.weight"
    weights[name] = torch.cat([weights[name][:first], weights[name][first:].repeat(3, 1)])
    large.load_state_dict(weights)
    ids = torch.randint(5, 20, (2, 21))
    expected = approximation_model.outputs(large, ids, None, 0)
    assert approximation_model.placement(large, 21, None) == {}
    torch.testing.assert_close(approximation_model.outputs(small, ids, None, 0), expected)
    with pytest.raises(ValueError, match="at most the model's 8 positions, got 9"):
        approximation_model.placement(small, 21, 9)


@pytest.mark.parametrize("backend", [None, "landmark"])
def test_repeated_positions_of_a_decoder_are_no_packed_sequences(backend):
    """The last token still sees the first one, many periods ago."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=24, max_position_embeddings=8)).eval()
    if backend is not None:
        favor.configure(model, backend, exact_below=0)
    ids = torch.randint(0, 24, (1, 30))
    places = approximation_model.placement(model, 30, None)
    assert places["position_ids"][0].tolist() == [i % 8 for i in range(30)]
    other = torch.cat([(ids[:, :1] + 1) % 24, ids[:, 1:]], 1)
    with torch.no_grad():
        last = [model(input_ids=x, use_cache=False, **places).logits[0, -1] for x in (ids, other)]
    assert (last[0] - last[1]).abs().max() > 1e-4


def test_backends_with_options_of_their_own():
    texts = ["favor+:num_features=32,window=4", "favor#:sderf:factorization=newton_schulz", "favor+:orthogonal=False"]
    found = [v for v in variants_of(texts, [8, 16], [0]) if v.is_backend]
    assert found == [
        Variant("favor+", None, 32, 4),
        Variant("favor#", "sderf", 8, 0, more=(("factorization", "newton_schulz"),)),
        Variant("favor#", "sderf", 16, 0, more=(("factorization", "newton_schulz"),)),
        Variant("favor+", None, 8, 0, more=(("orthogonal", False),)),
        Variant("favor+", None, 16, 0, more=(("orthogonal", False),)),
    ]
    assert found[-1].label == "favor+:orthogonal=False"
    assert found[-1].options(0)["orthogonal"] is False
    o = seen()
    out = HeadErrors(found, seed=3).output(found[-1], o, torch.arange(12))
    options = {"features": "pos", "num_features": 16, "scale": 0.6, "seed": 3}
    torch.testing.assert_close(out, favor.favor_attention(o.query, o.key, o.value, orthogonal=False, **options))
    different = favor.favor_attention(o.query, o.key, o.value, **options)
    assert (out - different).abs().max() > 1e-3
    HeadErrors(found, seed=3)(o)  # every option reaches the estimator


def test_landmarks_have_selected_keys_and_no_window():
    """They are softmax attention with as many selected keys as keys, and not with fewer."""
    found = [v for v in variants_of(["landmark"], [3], [0, 4], [6, 12]) if v.is_backend]
    assert found == [Variant("landmark", None, 3, 0, more=(("selected_keys", number),)) for number in (6, 12)]
    with pytest.raises(ValueError, match="landmark has no window"):
        variants_of(["landmark:window=4"], [3], [0])
    o, errors = seen(), HeadErrors(found)
    errors(o)
    means = [torch.stack(errors.errors[variant][0]).mean() for variant in found]
    assert means[1] < 1e-6 < 1e-2 < means[0]


def test_no_option_is_left_of_the_variant_before(bert_folder):
    model = BertModel.from_pretrained(bert_folder)
    for variant in variants_of(["favor+:orthogonal=False", "favor+"], [8], [4])[-2:]:
        approximation_model.switch(model, variant, 0)
        assert model.config.favor["orthogonal"] is (not variant.more)
    assert (model.config.favor["num_features"], model.config.favor["window"]) == (8, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("landmark:page=4", "unknown option page"),
        ("landmark:seed=4", "seed cannot be set for one of the compared backends"),
        ("favor_elu:num_features=4", "does not read num_features"),
        ("landmarks", "a backend must be one of .* got 'landmarks'"),
        ("favor#:wderf:64", "must be written NAME"),
    ],
)
def test_backends_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        variants_of([text], [8], [0])


def test_settings_that_each_layer_chose(bert_folder, text, tmp_path, monkeypatch):
    """With all operations every layer is exact."""
    monkeypatch.setattr("favor.integrations.adapt.convert.VALUES", {"num_features": (2,), "selected_keys": (0,)})
    converted = favor.convert(BertModel.from_pretrained(bert_folder), "landmark", num_features=5, selected_keys=0)
    number = converted.encoder.layer[0].attention.self.favor_layer.number
    update_choices(converted, {number: {"num_features": 24}})
    converted.save_pretrained(tmp_path / "converted")
    words = "--lengths 24 --samples 2 --num_features 8 --windows 0 --backends landmark"
    words += f" --adapted {tmp_path / 'converted'} --flop_budgets 0.2 1 --choose_on {text}"
    _, default, stored, cheap, exact = run(bert_folder, text, tmp_path, words)[0]["variants"]
    assert (stored["label"], stored["num_features"]) == ("landmark (converted)", 0)
    assert max(stored["by_head"][0]) < 1e-5 < 1e-3 < min(stored["by_head"][1])
    assert cheap["chosen"] == [{"num_features": 2, "selected_keys": 0}] * 2
    assert cheap["error"] > exact["error"] == 0
    assert exact["score"] == pytest.approx(1, abs=1e-6)
    # The default of `landmark` selects keys, more than these samples have, for single heads as for the whole model.
    assert default["error"] < 1e-5
    assert default["score"] == pytest.approx(1, abs=1e-6)


def test_report_of_an_encoder_by_length(bert_folder, glue_folder, text, tmp_path):
    """Also beyond the 128 positions of the model."""
    words = f"--lengths 200 24 --samples 2 --num_features 8 --windows 0 24 --query_samples 50 --glue_dir {glue_folder}"
    found, lines = run(bert_folder, text, tmp_path, f"{words} --backends favor+ favor#:wderf landmark:selected_keys=30")
    assert found["facts"]["positions"] == "repeat every 128 tokens in longer samples"
    by_window = {(v["backend"], v["window"], v["length"]): v for v in found["variants"]}
    assert len(by_window) == len(found["variants"]) == 7 * 2
    whole, bare = by_window["favor#", 24, 24], by_window["favor+", 0, 24]
    assert whole["error"] < 1e-5 < 0.05 < bare["error"]
    assert whole["score"] == pytest.approx(1.0, abs=1e-6)
    assert bare["score"] < 1
    assert by_window[LOCAL, 24, 24]["error"] < 1e-5
    assert by_window[MEAN, 0, 24]["score"] is whole["sts"] is None
    assert -1 <= bare["sts"] <= 1
    assert str(tmp_path) not in lines
    by_name = {(v["backend"], v["length"]): v for v in found["variants"] if not v["window"]}
    for entry in found["variants"]:
        heads = np.array(entry["by_head"])
        expected = [heads.mean(), np.quantile(heads, 0.5), np.quantile(heads, 0.9), heads.max()]
        assert [entry[name] for name in ("error", "p50", "p90", "max")] == pytest.approx(expected, abs=1e-4)
    assert by_name["landmark", 24]["error"] < 1e-5 < by_name["landmark", 200]["error"]
    assert by_name["landmark", 200]["error"] < by_name["favor+", 200]["error"]
    assert by_name["landmark", 24]["score"] == pytest.approx(1.0, abs=1e-6)
    lines = lines.splitlines()
    assert "| mean error (p90) | M | window | L = 24 | L = 200 |" in lines
    name = "| `landmark:selected_keys=30` | 8 | -"
    assert any(line.startswith(f"{name} | 0.000 (0.000) | 0.") for line in lines)
    assert any(line.startswith(f"{name} | 24 | 0.000 | 0.000 | 0.000 | 0.000 | 100% |") for line in lines)
    assert any(line.startswith("| `favor#:wderf` | 8 | 24 | 24 | 0.000 |") for line in lines)
