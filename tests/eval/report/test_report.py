"""The report in a browser, without one: its numbers, its advice, and that nothing in the file is of another place."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer, BertModel, ModernBertConfig, ModernBertModel

import favor
from favor.eval import report
from favor.eval.approximation import __main__ as approximation
from favor.eval.approximation.variants import Variant
from favor.eval.report import pass_seconds, render, verdict

QUICK = ("--seconds_per_cell", "0.001", "--num_features", "8", "--windows", "0", "24", "--selected_keys", "0", "16")


def data_of(page: str) -> dict:
    return json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])


@pytest.fixture(scope="module")
def page(bert_folder, text, tmp_path_factory):
    """The page of a tiny BERT."""
    file = tmp_path_factory.mktemp("report") / "new" / "report.html"
    words = ["--text", str(text), "--html", str(file), "--lengths", "200", "24", "--samples", "2", *QUICK]
    assert report.main([str(bert_folder), *words]) == 0
    return file.read_text(encoding="utf-8")


def test_errors_and_scores_are_those_of_the_program_that_measures_them(page, bert_folder, text, tmp_path):
    words = ["--text", str(text), "--output_dir", str(tmp_path), "--lengths", "24", "200", "--samples", "2"]
    words += ["--backends", "landmark", "favor#", "favor++", "favor+", *QUICK[2:]]
    assert approximation.main([str(bert_folder), *words]) == 0
    measured = json.loads((tmp_path / "approximation.json").read_text())["variants"]
    names = ("num_features", "window", "length")
    expected = {(v["backend"], dict(v["more"]).get("selected_keys"), *(v[n] for n in names)): v for v in measured}
    uniform = {v["length"]: v["by_head"] for v in measured if v["backend"] == "mean of V"}
    found = data_of(page)
    # Landmarks with two K, three random features with two windows, each with two lengths.
    assert len(found["settings"]) == (2 + 3 * 2) * 2
    for setting in found["settings"]:
        truth = expected[tuple(setting[name] for name in ("backend", "K", "M", "window", "length"))]
        torch.testing.assert_close(torch.tensor(setting["errors"]), torch.tensor(truth["by_head"]), rtol=0, atol=1e-4)
        assert setting["error"] == pytest.approx(truth["error"], abs=1e-5)
        assert setting["score"] == pytest.approx(truth["score"], abs=1e-5)
        assert setting["seconds"] > 0
    for part in found["lengths"]:
        own = torch.tensor(part["uniform"])
        torch.testing.assert_close(own, torch.tensor(uniform[part["length"]]), rtol=0, atol=1e-4)


def test_the_line_to_copy_configures_what_was_measured(page, bert_folder):
    model = BertModel.from_pretrained(bert_folder)
    for setting in data_of(page)["settings"]:
        eval(setting["code"], {"favor": favor, "model": model})
        assert model.config._attn_implementation == setting["backend"]
        runs = favor.describe(model, setting["length"]).layers[0]
        assert (runs.num_features, runs.window) == (setting["M"], setting["window"])
        assert setting["K"] is None or model.config.favor["selected_keys"] == setting["K"]
        assert favor.describe(model, setting["length"] - 1).layers[0].runs == "exact"


def test_nothing_comes_from_the_network_and_nothing_tells_of_this_machine(page, bert_folder, text, tmp_path):
    assert not re.search(r"https?:|\b(src|href)=|url\(|@import|\bfetch\(|XMLHttp|import\(", page)
    assert "default-src 'none'" in page
    assert "{{" not in page.partition("<script>")[0]
    assert not any(str(folder) in page for folder in (bert_folder.parent, text.parent, tmp_path.parent))
    assert all(part in page for part in (bert_folder.name, text.name, 'name="viewport"'))


def test_names_cannot_leave_their_place_and_numbers_that_are_none_become_null(page):
    data = data_of(page)
    evil = "</script><script>alert(1)</script><!--{{data}}&quot;\u2028"
    hostile = {**data, "model": evil, "facts": {"Text": evil}}
    again = render(hostile)
    assert again.count("<script") == page.count("<script") == 2
    assert "<!--" not in again
    assert data_of(again) == hostile
    assert again.count("&lt;script&gt;alert(1)") == 3  # title, heading, facts
    data["settings"][0] |= {"errors": [[float("nan"), 1.0], [float("inf"), 2.0]], "error": float("nan")}
    found = data_of(render(data))["settings"][0]
    assert (found["errors"], found["error"]) == ([[None, 1.0], [None, 2.0]], None)


def setting(error, seconds, **more):
    common = {"backend": "landmark", "M": 64, "K": 0, "window": 0, "score": 0.9876}
    return common | {"error": error, "seconds": seconds} | more


WINDOW = {"K": None, "window": 9}
ADVICE = [
    ([(0.3, 0.1, {}), (0.2, 1, {"K": 25}), (0.1, 1.5, {})], r"use landmark .* K = 25: 2\.0 x .* 0\.20 .* 0\.988"),
    ([(0.3, 0.1, {}), (0.2, 1.9, WINDOW)], r"keep exact .* M = 64, window 9, the fastest .* takes 0\.95 x"),
    ([(0.3, 0.1, {}), (float("nan"), 0.1, {})], r"keep exact attention: no setting has a mean error of 0\.25 or less"),
]


@pytest.mark.parametrize(("settings", "expected"), ADVICE)
def test_advice(settings, expected):
    said = verdict(4096, [setting(error, seconds, **more) for error, seconds, more in settings], 2.0, 0.25, "cosine")
    assert re.search(f"^At 4,096 tokens {expected}", said), said


def test_each_time_is_of_its_own_attention(bert_folder):
    model, seen = BertModel.from_pretrained(bert_folder, attn_implementation="sdpa").eval(), set()

    def look(module, given):
        backend = model.config._attn_implementation
        seen.add((backend, model.config.favor["num_features"]) if backend in favor.BACKENDS else (backend, None))

    model.register_forward_pre_hook(look)
    variants = [Variant("favor+", None, 8, 0), Variant("favor+", None, 16, 0), Variant("landmark", None, 8, 0)]
    found = pass_seconds(model, torch.ones(1, 24, dtype=torch.long), variants, 0, 0.001)
    assert set(found) == {None, *variants}
    assert min(found.values()) > 0
    assert seen == {("sdpa", None), ("favor+", 8), ("favor+", 16), ("landmark", 8)}
    assert model.config._attn_implementation == "sdpa"


def test_local_layers_are_not_measured(bert_folder, text, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 24}
    tokens = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    layers = {"num_hidden_layers": 4, "global_attn_every_n_layers": 3, "local_attention": 8}
    ModernBertModel(ModernBertConfig(**sizes, **tokens, **layers)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path / "model")
    words = ["--text", str(text), "--html", str(tmp_path / "x.html"), "--lengths", "40", *QUICK]
    assert report.main([str(tmp_path / "model"), *words, "--backends", "landmark", "favor+"]) == 0
    found = data_of((tmp_path / "x.html").read_text())
    assert found["layers"] == ["layers.0.attn", "layers.3.attn"]
    assert found["facts"]["Attention layers"].startswith("2 of 4")
    assert all(len(s["errors"]) == 2 for s in found["settings"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--text": "nowhere.txt"}, "expected a text file, got nowhere.txt, which is not there"),
        ({"--lengths": "9000"}, "too few for one sample of 9000: give a longer text"),
        ({"model": "no such model"}, "expected a model, got 'no such model'"),
        ({"--html": "."}, "--html must be a file, and . is a folder"),
        ({"--backends": "favour"}, "a backend must be one of .* got 'favour'"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(changed, message, bert_folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(report.whole, "measure", None)
    given = {"model": str(bert_folder), "--text": str(text), "--html": str(tmp_path / "x.html"), **changed}
    with pytest.raises(ValueError, match=message):
        report.main([given.pop("model"), *(word for pair in given.items() for word in pair)])
    assert not (tmp_path / "x.html").exists()
