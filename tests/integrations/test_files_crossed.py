"""How many files of the package one forward pass goes through: so many a reader has to open to follow it."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

import favor


def files_crossed(model, **inputs):
    """Files below the package folder of which a function runs in a forward pass."""
    folder, files = Path(favor.__file__).parent, set()

    def profile(frame, event, _):
        # Modules and classes that are being defined are code, too, but not functions.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    with torch.no_grad():
        sys.setprofile(profile)
        try:
            model(**inputs)
        finally:
            sys.setprofile(before)
    return sorted(str(Path(file).relative_to(folder)) for file in files if Path(file).is_relative_to(folder))


@pytest.mark.parametrize(("window", "most"), [(0, 12), (32, 15)], ids=["plain", "window"])
def test_one_forward_pass_stays_in_few_files(window, most):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
    model = BertModel(BertConfig(**sizes, vocab_size=50)).eval()
    favor.configure(model, "favor+", num_features=64, exact_below=0, window=window)
    mask = torch.ones(2, 200, dtype=torch.long)
    mask[1, 150:] = 0
    files_crossed(model, input_ids=torch.ones_like(mask), attention_mask=mask)  # reads options, draws directions
    files = files_crossed(model, input_ids=torch.ones_like(mask), attention_mask=mask)
    assert "integrations/backend.py" in files
    assert len(files) <= most, "\n".join(files)
    assert len([file for file in files if file.startswith("integrations/")]) <= 3
