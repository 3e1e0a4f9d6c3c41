"""The benchmark of generation through landmarks."""

from __future__ import annotations

import json

from favor.eval import decoding

WORDS = ["--lengths", "600", "--num_hidden_layers", "1"]


def test_the_table(tmp_path):
    assert decoding.main([*WORDS, "--tokens", "4", "--selected_keys", "64", "--output_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decoding_cpu.json").read_text())
    assert [row["shape"] for row in found["rows"]] == ["llama", "gemma"]
    assert all(row["error"] < 1e-4 for row in found["rows"])
    text = (tmp_path / "decoding_cpu.md").read_text()
    assert "| gemma | 600 |" in text
    assert "with 64 selected keys" in text


def test_a_cache_that_gives_something_else_is_not_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "TOLERANCE", 0.0)
    assert decoding.main([*WORDS, "--tokens", "3", "--shapes", "llama", "--output_dir", str(tmp_path)]) == 1
    assert "no times are given" in capsys.readouterr().out
