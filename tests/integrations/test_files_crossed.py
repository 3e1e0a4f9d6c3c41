"""How many files of the package one forward pass goes through: so many a reader has to open to follow it."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from architectures import BERT

import favor


def files_crossed(model, **inputs):
    """Files below the package folder of which a function runs in a forward pass."""
    folder, files = Path(favor.__file__).parent, set()

    def profile(frame, event, _):
        # Modules and classes that are being defined are code, too, but not functions.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        model(**inputs)
    finally:
        sys.setprofile(before)
    return sorted(str(Path(file).relative_to(folder)) for file in files if Path(file).is_relative_to(folder))


@torch.no_grad()
@pytest.mark.parametrize(("window", "most"), [(0, 12), (32, 15)], ids=["plain", "window"])
def test_one_forward_pass_stays_in_few_files(window, most):
    model = BERT.build("favor+", num_features=64, exact_below=0, window=window)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, 40:] = 0
    files_crossed(model, input_ids=torch.ones_like(mask), attention_mask=mask)  # reads options, draws directions
    files = files_crossed(model, input_ids=torch.ones_like(mask), attention_mask=mask)
    assert "integrations/backend.py" in files
    assert len(files) <= most, "\n".join(files)
    assert len([file for file in files if file.startswith("integrations/")]) <= 3
