"""Causal landmarks in small sections, so that the short sequences of tests have closed ones; tests/landmark has all."""

import pytest

from favor.integrations.adapt import convert
from favor.landmark import causal, kept

SIZES = {"SECTION": 16, "BLOCK": 8, "STEP": 2, "SHARE": 2}


def set_small_sections(patch: pytest.MonkeyPatch) -> None:
    """Sets them until the patch ends."""
    for module in (causal, kept, convert):
        for name in SIZES.keys() & vars(module).keys():
            patch.setattr(module, name, SIZES[name])
