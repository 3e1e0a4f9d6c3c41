"""The benchmark of an encoder with local and global layers."""

import json

from favor.eval import hybrid


def test_writes_times_memory_and_checks(tmp_path):
    argv = [
        "--lengths",
        "64",
        "128",
        "--layers",
        "3",
        "--repeats",
        "1",
        "--num_features",
        "16",
        "--output_dir",
        str(tmp_path),
    ]
    assert hybrid.main([*argv, "--backends", "landmark"]) == 0
    content = json.loads((tmp_path / "hybrid_cpu.json").read_text())
    cells = [cell for own in content["results"].values() for cell in own.values()]
    assert len(cells) == 4
    assert all(cell["seconds"] > 0 and cell["bytes"] > 0 for cell in cells)
    assert len(content["checks"]) == 3
    assert "3 layers (1 global" in (tmp_path / "hybrid_cpu.md").read_text()
