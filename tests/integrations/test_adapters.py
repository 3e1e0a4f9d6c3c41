"""Adapters of peft keep the backend; docs/recipes shows that the Trainer and sentence-transformers do."""

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, tokens

import favor

LLAMA = next(a for a in ARCHITECTURES if a.name == "llama")
SMALL = {"num_features": 4, "exact_below": 0}
pytestmark = [  # of the libraries
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture
def base(tmp_path):
    """A base model that knows nothing of FAVOR, saved."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(LLAMA.config())
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("how", ["auto", "plain"])
def test_an_adapter_takes_up_the_backend_it_was_trained_with(base, tmp_path, caplog, how):
    peft = pytest.importorskip("peft")
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="landmark")
    favor.configure(model, **SMALL)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    inputs = tokens(False)
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path / "adapter")
    if how == "auto":
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    else:
        again = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert "the adapter was trained in a model with landmark" in caplog.text
    torch.testing.assert_close(again.eval()(**inputs).logits, expected)
    assert favor.describe(again) == favor.describe(adapted)


def test_a_damaged_note_beside_an_adapter_is_refused(base, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="landmark")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    note = tmp_path / "adapter" / "favor.json"
    note.write_text(note.read_text().replace('"landmark"', '"flash"', 1))
    with pytest.raises(ValueError, match="names the backend 'flash'"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_adapters_of_other_modules_and_other_folders_are_left_alone(base, tmp_path):
    peft = pytest.importorskip("peft")
    plain = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    plain.save_pretrained(tmp_path / "plain")
    exact = peft.get_peft_model(
        hf.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    exact.save_pretrained(tmp_path / "exact")
    assert not (tmp_path / "exact" / "favor.json").exists()
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exact")
    assert {layer.runs for layer in favor.describe(again).layers} == {"exact"}
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="landmark")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "run" / "earlier")
    model.set_attn_implementation("favor+")
    adapted.save_pretrained(tmp_path / "run")
    assert "landmark" in (tmp_path / "run" / "earlier" / "favor.json").read_text()
    assert "favor+" in (tmp_path / "run" / "favor.json").read_text()
    model.set_attn_implementation("sdpa")
    adapted.save_pretrained(tmp_path / "run")
    assert not (tmp_path / "run" / "favor.json").exists()
