"""The benchmark of generation refuses times of caches that disagree, and counts what they hold."""

import json

import favor
from favor.eval import generation

SMALL = ["--lengths", "6", "12", "--tokens", "3", "--num_hidden_layers", "1", "--num_features", "8"]


def test_report_holds_times_and_bytes(tmp_path):
    assert generation.main([*SMALL, "--window", "4", "--output_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "generation_cpu.json").read_text())
    # 4 key heads of 64: keys and values of every token, or 8 weights and means and, of 15 tokens, 3 in a block.
    assert found["contexts"]["12"]["ways"]["sdpa, DynamicCache"]["bytes"] == 2 * 15 * 4 * 64 * 4
    assert found["contexts"]["12"]["ways"]["favor, FavorCache"]["bytes"] == 4 * 4 * (8 * 65 + 3 * (64 + 64 + 1))
    assert all(way["milliseconds"] > 0 for way in found["contexts"]["6"]["ways"].values())
    assert "| 12 |" in (tmp_path / "generation_cpu.md").read_text()


def test_no_time_where_the_caches_disagree(tmp_path, monkeypatch, capsys):
    read = favor.integrations.cache.StreamLayer.read

    def forget(self, options):
        state = read(self, options)
        if state.memory is not None:
            state.memory.summary.zero_()
        return state

    monkeypatch.setattr(favor.integrations.cache.StreamLayer, "read", forget)
    assert generation.main([*SMALL, "--output_dir", str(tmp_path)]) == 1
    assert "the caches differ by" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
