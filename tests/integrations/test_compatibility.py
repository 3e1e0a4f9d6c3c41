"""Models of transformers through the functions of `favor.eval.compatibility`: one or more of every kind."""

import json

import pytest
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from favor.eval.compatibility import __main__ as program
from favor.eval.compatibility.__main__ import candidates, lines_of
from favor.eval.compatibility.check import check
from favor.integrations import backend, masks

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(transformers.__version__ < "5.23", reason="the classes are those of transformers 5.23"),
]
EQUAL = {
    "modernbert": "ModernBertModel",  # sliding windows between global layers
    "aimv2": "Aimv2TextModel",  # the module says that it is not causal, the mask says that it is
    "llama": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "youtu": "YoutuModel",  # values have another width than keys
    "jamba": "JambaModel",
    "clip": "CLIPModel",
    "lightglue": "LightGlueForKeypointMatching",  # the module says that it is causal, and it is not
    "wav2vec2": "Wav2Vec2Model",
    "whisper": "WhisperModel",
    "moonshine": "MoonshineDecoder",  # the argument of the call says that it is not causal, the mask that it is
    "bigbird_pegasus": "BigBirdPegasusDecoder",
}
REFUSED = {
    "colpali": ("ColPaliForRetrieval", "transformers' own attentions disagree"),
    "mpnet": ("MPNetModel", "never asks transformers for a backend"),
    "falcon": ("FalconModel", "never asks transformers for a backend"),  # classes by name
    "mpt": ("MptModel", "never asks transformers for a backend"),  # masks of the backend
    "sam": ("SamVisionModel", "never asks transformers for a backend"),  # classes by name beside others
    "bridgetower": ("BridgeTowerModel", "never asks transformers for a backend"),  # a module of torch
    "deepseek_v32": ("DeepseekV32Model", "sparse attention"),
}


def result_of(family: str, name: str) -> dict:
    (candidate,) = [own for own in candidates([family])[0] if own.name == name]
    return check(candidate)


@pytest.mark.parametrize(("family", "name"), EQUAL.items())
def test_is_exact_attention_with_a_landmark_for_every_key(family, name):
    result = result_of(family, name)
    assert result["category"] == "equal", result
    assert result["estimated"] + result["local"] == result["calls"] > 0
    assert max(result["errors"].values()) < 1e-5
    assert result["few"] > 1e-3
    states = {"llama": "2 of 2", "gemma3": "1 of 2"}
    assert family not in states or result["cache"] == f"equal: {states[family]} layers keep a state"


def test_sliding_windows_stay_exact():
    result = result_of("mistral", "MistralForCausalLM")
    assert (result["category"], result["estimated"], result["local"]) == ("local", 0, 2)
    assert max(result["errors"].values()) < 1e-5


@pytest.mark.parametrize(("family", "name", "reason"), [(family, *own) for family, own in REFUSED.items()])
def test_what_would_be_dropped_or_ignored_is_refused(family, name, reason):
    result = result_of(family, name)
    assert result["category"] == "refused"
    assert reason in result["reason"]


def test_differences_between_attentions_of_transformers_are_reported():
    results = [result_of("paligemma", "PaliGemmaModel"), result_of("bert", "BertModel")]
    assert results[0]["category"] == "refused"
    assert "transformers' own attentions disagree" in results[0]["reason"]
    assert results[1]["category"] == "equal"
    assert set(results[0]["sdpa_and_eager_differ"]) == {"whole", "ones"}
    assert "sdpa_and_eager_differ" not in results[1]
    assert results[1]["types"] == "taken"
    assert max(results[1]["errors_to_sdpa"].values()) < 1e-5
    (*_, line) = lines_of(results)
    assert line.startswith("| PaliGemmaModel | whole ")


@pytest.mark.parametrize(("family", "name"), [("llama", "LlamaModel"), ("bert", "BertModel")])
def test_lost_causality_and_lost_padding_are_found(monkeypatch, family, name):
    monkeypatch.setattr(backend, "visibility", lambda *args, **kwargs: masks.Visibility(causal=False))
    result = result_of(family, name)
    assert result["category"] == "wrong"
    assert (result["errors"]["in blocks, whole"] < 1e-5) == (family == "bert")


def test_exact_attention_under_our_name_is_found(monkeypatch):
    def exact(call, query, key, value, mask=None):
        return sdpa_attention_forward(call.module, query, key, value, None)[0]

    monkeypatch.setattr(backend, "_estimated", lambda *args: exact(*args[3:]))
    result = result_of("bert", "BertModel")
    assert (result["category"], result["reason"]) == ("silently exact", "BertSelfAttention is not estimated")


def test_the_program_writes_a_table(tmp_path, capsys):
    assert program.main(["--model_types", "bert", "mpnet", "--output_dir", str(tmp_path), "--jobs", "1"]) == 0
    classes = json.loads((tmp_path / "compatibility.json").read_text())["classes"]
    found = {own["class"]: own["category"] for own in classes}
    assert (found["BertModel"], found["MPNetModel"]) == ("equal", "refused")
    text = (tmp_path / "compatibility.md").read_text()
    assert "| bert | 1 equal |" in text
    assert "| silently exact | 0 |" in text
    assert f"transformers {transformers.__version__}" in text
    assert "bert.BertModel: equal" in capsys.readouterr().out
