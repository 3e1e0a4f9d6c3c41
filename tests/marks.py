"""Marks of tests that need a package which not every installation has."""

from importlib.util import find_spec

import pytest

HAS_SEARCH = find_spec("flashlight") is not None
needs_search = pytest.mark.skipif(not HAS_SEARCH, reason="needs flashlight-text, of the extra lm")
