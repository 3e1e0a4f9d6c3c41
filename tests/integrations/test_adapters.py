"""Adapters of peft keep the backend; docs/recipes shows that the Trainer and sentence-transformers do."""

import pytest
import torch
import transformers as hf
from architectures import LLAMA, tokens

import favor

peft = pytest.importorskip("peft")
pytestmark = [  # of the libraries
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture
def base(tmp_path):
    """A base model that knows nothing of FAVOR, saved."""
    torch.manual_seed(0)
    hf.LlamaForCausalLM(LLAMA.config()).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base, backend="landmark"):
    model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation=backend)
    if backend == "landmark":
        favor.configure(model, num_features=4, exact_below=0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("how", ["auto", "plain"])
def test_an_adapter_takes_up_the_backend_it_was_trained_with(base, tmp_path, caplog, how):
    model, inputs = adapted(base), tokens(False)
    model.save_pretrained(tmp_path / "adapter")
    if how == "auto":
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    else:
        again = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert "the adapter was trained in a model with landmark" in caplog.text
    torch.testing.assert_close(again.eval()(**inputs).logits, model(**inputs).logits)
    assert favor.describe(again) == favor.describe(model)
    note = tmp_path / "adapter" / "favor.json"
    note.write_text(note.read_text().replace('"landmark"', '"flash"', 1))
    with pytest.raises(ValueError, match="names the backend 'flash'"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_adapters_of_other_modules_and_other_folders_are_left_alone(base, tmp_path):
    plain = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    plain.save_pretrained(tmp_path / "plain")
    adapted(base, "sdpa").save_pretrained(tmp_path / "exact")
    assert not (tmp_path / "exact" / "favor.json").exists()
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exact")
    assert {layer.runs for layer in favor.describe(again).layers} == {"exact"}
    model, run = adapted(base), tmp_path / "run"
    model.save_pretrained(run / "earlier")
    model.base_model.model.set_attn_implementation("favor+")
    model.save_pretrained(run)
    assert "landmark" in (run / "earlier" / "favor.json").read_text()
    assert "favor+" in (run / "favor.json").read_text()
    model.base_model.model.set_attn_implementation("sdpa")
    model.save_pretrained(run)
    assert not (run / "favor.json").exists()
