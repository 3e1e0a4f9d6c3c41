"""Small sections in causal landmarks, for tests that ask for them."""

import pytest
from small_sections import set_small_sections


@pytest.fixture
def small_sections(monkeypatch):
    set_small_sections(monkeypatch)
