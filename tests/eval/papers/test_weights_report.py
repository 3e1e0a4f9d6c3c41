"""The report on weights of features: its numbers from their definition, its checks, and that it runs."""

import math

import torch
from transformers import LlamaForCausalLM

import favor
from favor.eval.papers import feature_weights
from favor.eval.papers.feature_weights import PLAIN, REFINED, WEIGHTS, Divergences, Variant
from favor.integrations.adapt.observe import observe

SMALL = ["--max_length", "32", "--baselines", "8", "16", "--windows", "0", "8", "--seeds", "0"]


def test_divergence_of_grouped_causal_heads(decoder_folder):
    """A window over everything is softmax; without one, row by row from the output of `favor_attention`."""
    decoder, ids = LlamaForCausalLM.from_pretrained(decoder_folder).eval(), torch.arange(20)[None] % 11
    exact, plain = Variant("favor+", 8, 32, PLAIN, 0), Variant("favor+", 8, 0, PLAIN, 0)
    found, seen = Divergences({exact: None, plain: None}), []
    with torch.no_grad():
        for callback in (found, seen.append):
            with observe(decoder, callback):
                decoder(ids)
    assert max(map(abs, found.divergence[exact])) < 1e-5
    assert max(found.error[exact]) < 1e-5
    o = seen[0]  # the first layer
    for head in range(4):
        options = {"features": "pos", "num_features": 8, "scale": o.scale, "layer": o.layer, "is_causal": True}
        eye = torch.eye(20).expand(1, 2, -1, -1)
        rows = favor.favor_attention(o.query, o.key, eye, **options)[0, head]
        total = 0.0
        for i in range(20):
            softmax = (o.scale * o.key[0, head // 2, : i + 1] @ o.query[0, head, i]).softmax(-1)
            total += (softmax * (softmax.log() - rows[i, : i + 1].log())).sum().item() / 20
        assert math.isclose(found.divergence[plain][head], total, rel_tol=1e-3)


def test_the_report(bert_folder, text, monkeypatch, ran):
    for name, value in {"CALIBRATION_SAMPLES": 2, "HELD_OUT_SAMPLES": 2, "NUM_FEATURES": 8}.items():
        monkeypatch.setattr(feature_weights, name, value)
    words = [bert_folder, "--text", text, "--held_out", text, *SMALL, "--backends", "favor+", "favor#"]
    content, report = ran(feature_weights, *words, code=0)
    rows = {(row["window"], row["backend"], row["kind"], row["M"]): row for row in content["rows"]}
    assert len(rows) == 2 * (2 + 1 + 4 + 2)
    for window in (0, 8):
        assert rows[window, "favor+", WEIGHTS, 8]["kl"] < rows[window, "favor+", PLAIN, 8]["kl"]
        assert rows[window, "favor#", REFINED, 8]["kl"] < rows[window, "favor#", WEIGHTS, 8]["kl"]
    assert f"{text.name}, window 8" in report


def test_a_check_that_fails_says_so():
    common = {"text": "t", "window": 0, "backend": "favor+"}
    for learned, said in ((1.1, "DOES NOT HOLD"), (1.0, "holds")):
        cells = ((PLAIN, 192, 1.0), (WEIGHTS, 64, learned), (PLAIN, 64, 0.1))
        (check,) = feature_weights.acceptance([common | {"kind": k, "M": m, "kl": kl} for k, m, kl in cells])
        assert check.line().startswith(f"{said}: favor+, window 0, t")
