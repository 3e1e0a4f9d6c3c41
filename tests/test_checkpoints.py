"""Checkpoints of version 0.1.0, made by tests/checkpoints/make.py: they load, and give what they gave there.

Those with landmarks give what the present form of landmarks gives.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForCTC, AutoModelForSequenceClassification

import favor.models  # noqa: F401

ROOT = Path(__file__).parent / "checkpoints"
# Folder: how it is loaded, and the backend, where the checkpoint does not know it.
FOLDERS = {
    "bert_batch": (AutoModel, "favor++"),
    "bert_batch_window": (AutoModel, "favor#"),
    "bert_calibrated": (AutoModel, "favor#"),
    "bert_calibrated_window": (AutoModel, "favor#"),
    "bert_converted": (AutoModel, "favor#"),
    "bert_landmark": (AutoModel, "favor#"),
    "bert_landmark_window": (AutoModel, "favor#"),
    "bert_weights": (AutoModel, "favor+"),
    "llama_calibrated": (AutoModelForCausalLM, "favor#"),
    "performer_bert": (AutoModelForSequenceClassification, None),
    "conformer_stream": (AutoModelForCTC, None),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_of_the_first_version_gives_what_it_gave_and_is_written_as_it_was(name, tmp_path):
    assert {path.name for path in ROOT.iterdir() if (path / "config.json").exists()} == set(FOLDERS)
    auto, backend = FOLDERS[name]
    options = {} if backend is None else {"attn_implementation": backend}
    model, info = auto.from_pretrained(ROOT / name, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.eval().save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (ROOT / name, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    expected, inputs = (load_file(ROOT / name / f"{part}.safetensors") for part in ("outputs", "inputs"))
    with torch.no_grad():
        found = {"0": model(**inputs)[0]}
        if "pieces" in expected:
            stream = model.stream(batch_size=2)
            pieces = inputs["input_features"].split([33, 47], dim=1)
            found["pieces"] = torch.cat([stream.feed_features(piece) for piece in pieces], dim=1)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # Bit for bit on the processor that wrote them; others round otherwise.
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)
