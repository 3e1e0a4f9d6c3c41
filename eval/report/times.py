"""Times of a forward pass with exact attention and with each setting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from favor.eval.approximation import model as whole
from favor.eval.approximation.variants import Variant
from favor.eval.speed.measure import Stopwatch, interleaved, seconds

# At least three, so that one pass that another process delays is not the median.
FEWEST, MOST = 3, 5


@torch.no_grad()
def pass_seconds(
    model: PreTrainedModel, ids: Tensor, found: Sequence[Variant], seed: int, budget: float
) -> dict[Variant | None, float]:
    """Times forward passes of one sample, the settings in turns, so that a noisy machine delays all of them equally.

    Each setting must have run at this length before, so that no pass does work that is done only once.

    Args:
        model: with exact attention; it has exact attention afterwards too.
        ids: one sample `[1, L]`.
        found: the variants to time.
        seed: draws the random directions.
        budget: seconds per variant; at least three and at most five passes are timed.

    Returns:
        The median by variant; None is exact attention.
    """
    device, one_pass = model.device.type, partial(model, **whole.text_inputs(model, ids))
    expected = seconds(one_pass, device)
    settings: dict[str, Variant | None] = {"exact": None, **{variant.title: variant for variant in found}}
    entries = {
        name: Stopwatch(one_pass, partial(whole.switch, model, variant, seed), expected)
        for name, variant in settings.items()
    }
    timings = interleaved(entries, device, MOST, max(budget, FEWEST * expected * 1.01))
    whole.switch(model, None, seed)
    found_seconds = {}
    for name, timing in timings.items():
        if isinstance(timing, Exception):
            raise timing
        found_seconds[settings[name]] = timing.median
    return found_seconds
