"""The benchmark of an encoder with local and global layers."""

import ctypes
import json

import pytest
from transformers import ModernBertConfig

from favor.eval import hybrid
from favor.eval.speed import measure

NARROW = {"hidden_size": 192, "intermediate_size": 288}


@pytest.fixture
def own_allocator():
    """The program has malloc give memory back at once, for the life of the process; that would slow down later tests.

    The values are those that malloc's own ones grow to.
    """
    yield
    for setting, size in ((measure._TRIM_THRESHOLD, 64 << 20), (measure._MMAP_THRESHOLD, 32 << 20)):
        ctypes.CDLL(None).mallopt(setting, size)


@pytest.mark.usefixtures("own_allocator")
def test_writes_times_memory_and_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid, "ModernBertConfig", lambda **sizes: ModernBertConfig(**{**sizes, **NARROW}))
    argv = ["--lengths", "128", "256", "--num_hidden_layers", "3", "--repeats", "1", "--num_features", "16"]
    assert hybrid.main([*argv, "--output_dir", str(tmp_path), "--backends", "landmark"]) == 0
    content = json.loads((tmp_path / "hybrid_cpu.json").read_text())
    cells = [cell for own in content["results"].values() for cell in own.values()]
    assert len(cells) == 4
    assert all(cell["seconds"] > 0 and cell["bytes"] > 0 for cell in cells)
    assert len(content["checks"]) == 3
    assert "3 layers (1 global" in (tmp_path / "hybrid_cpu.md").read_text()
