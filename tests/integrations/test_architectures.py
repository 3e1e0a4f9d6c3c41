"""Models of transformers of every kind with linear attention, and how many files of favor one forward pass crosses."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, BERT
from pairwise import pairs

import favor


def every_pair(**axes):
    """Every architecture with every value of an axis, and with and without padding if it can be padded."""
    names, cases = pairs(architecture=ARCHITECTURES, padded=(False, True), **axes)
    cases = [(a, padded and a.can_pad, *rest) for a, padded, *rest in cases]
    ids = [f"{a.name}-{'padded' if padded else 'whole'}-{'-'.join(map(str, rest))}" for a, padded, *rest in cases]
    return pytest.mark.parametrize(names, cases, ids=ids)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning"),
    pytest.mark.usefixtures("small_sections"),
]


def run(model, architecture, padded):
    """Real tokens' outputs and the gradients of a fixed function of them with respect to all parameters."""
    out = architecture.real(model(**architecture.inputs(padded)).last_hidden_state, padded)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    model.zero_grad()
    (out * weight).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out.detach(), gradient


SOFTMAX = {}


def with_softmax(architecture, padded):
    """What `run` gives with softmax attention, computed once."""
    case = architecture.name, padded
    if case not in SOFTMAX:
        SOFTMAX[case] = run(architecture.build("sdpa"), architecture, padded)
    return SOFTMAX[case]


def distance(one, other):
    return ((one - other).norm() / other.norm()).item()


@every_pair(backend=("favor+", "favor++", "favor#"))
def test_approaches_exact_attention(architecture, padded, backend):
    """A mask, a scale, a causal triangle or a head that is off would not go away with more features."""
    exact = with_softmax(architecture, padded)
    errors = []
    for num_features in (64, 8192):
        model = architecture.build(backend, num_features=num_features, exact_below=0)
        out, gradient = run(model, architecture, padded)
        assert gradient.isfinite().all()
        errors.append((distance(out, exact[0]), distance(gradient, exact[1])))
    assert errors[1][0] < 0.05
    assert errors[1][0] < errors[0][0] / 3
    assert errors[1][1] < errors[0][1] / 2


EXACT = {
    "all keys are selected": {"features": "landmark", "num_features": 4, "exact_below": 0, "selected_keys": 100},
    "a window over the sequence": {"num_features": 64, "exact_below": 0, "window": 64},
    "exact_below": {"num_features": 64},
}


@every_pair(how=EXACT)
def test_what_is_exact_in_every_layer(architecture, padded, how):
    """Outputs and gradients, cross attention and causal layers too."""
    exact, options = with_softmax(architecture, padded), EXACT[how]
    # Cross attention has no window, and so more features are what brings it close.
    estimated = "window over" in how and architecture.name == "bart"
    model = architecture.build("favor#", **options | ({"num_features": 4096} if estimated else {}))
    found = run(model, architecture, padded)
    assert distance(found[0], exact[0]) < (0.1 if estimated else 1e-5)
    assert distance(found[1], exact[1]) < (0.3 if estimated else 1e-4)


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
