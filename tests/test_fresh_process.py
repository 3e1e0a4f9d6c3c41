"""What only a process of its own shows: what importing takes along, and models that come back by Auto classes alone."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from favor.models.bert import PerformerBertConfig, PerformerBertForSequenceClassification
from favor.models.conformer import ConformerConfig, ConformerForCTC, ConformerModel

PROGRAM = """
import sys
import favor.features
assert "sklearn" not in sys.modules
favor.features.SoftmaxKernelSampler
assert "sklearn" in sys.modules
import transformers
from safetensors.torch import load_file, save_file
for folder, auto in zip(sys.argv[1::2], sys.argv[2::2]):
    model = getattr(transformers, auto).from_pretrained(folder).eval()
    outputs = model(**load_file(folder + "/inputs.safetensors")).to_tuple()
    save_file({str(i): t.detach().contiguous() for i, t in enumerate(outputs)}, folder + "/outputs.safetensors")
    print(type(model).__name__, model.config._attn_implementation, model.config.favor["num_features"])
"""
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SOUND = {"conv_kernel_size": 5, "subsampling_conv_channels": 16, "vocab_size": 12, "num_mel_bins": 10}


def bert_inputs():
    mask = torch.arange(24) < torch.tensor([[24], [17], [24]])
    ids = torch.randint(5, 19, (3, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask.long()}


def conformer_inputs():
    features = torch.randn(3, 90, 10, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "attention_mask": torch.arange(90) < torch.tensor([[90], [61], [13]])}


@pytest.mark.slow
def test_a_fresh_process_takes_scikit_learn_when_asked_for_and_gives_the_same_bits(tmp_path):
    torch.manual_seed(0)
    options = {"num_features": 12, "features": "saderf", "exact_below": 0, "seed": 5}
    words = PerformerBertConfig(**TINY, vocab_size=20, max_position_embeddings=40, num_labels=3, favor=options)
    sound = ConformerConfig(**TINY, **SOUND, favor={"num_features": 16, "exact_below": 0})
    cases = {
        "AutoModelForSequenceClassification": (PerformerBertForSequenceClassification(words), bert_inputs()),
        "AutoModel": (ConformerModel(sound), conformer_inputs()),
        "AutoModelForCTC": (ConformerForCTC(sound), conformer_inputs()),
    }
    command, lines = [sys.executable, "-W", "ignore", "-c", PROGRAM], []
    for auto, (model, inputs) in cases.items():
        folder = tmp_path / auto
        model.save_pretrained(folder)
        save_file(inputs, folder / "inputs.safetensors")
        command += [str(folder), auto]
        lines.append(f"{type(model).__name__} favor# {model.config.favor['num_features']}")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == lines
    for auto, (model, inputs) in cases.items():
        found = load_file(tmp_path / auto / "outputs.safetensors")["0"]
        with torch.no_grad():
            assert torch.equal(found, model.eval()(**inputs)[0]), auto
