"""The benchmark of generation refuses times of a cache that gives something else, and counts what caches hold."""

import pytest

import favor
from favor.eval import generation

SMALL = ["--num_features", "8", "--selected_keys", "64"]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(generation, "TOKENS", 3)


def test_report_holds_times_and_bytes(ran):
    rows = ran(generation, *SMALL, "--window", 4, "--lengths", 12, 6)[0]["rows"]
    cells = [(backend, context) for backend in ("favor+", "landmark") for context in (6, 12)]
    assert [(row["backend"], row["context"]) for row in rows] == cells
    assert all(row["exact_ms"] > 0 and row["own_ms"] > 0 and row["error"] < 1e-4 for row in rows)
    # 2 layers, 4 key heads of 64: keys and values of 15 tokens, or 8 weights and means, and 3 tokens in a block.
    assert rows[1]["exact_bytes"] == 2 * 2 * 15 * 4 * 64 * 4
    assert rows[1]["own_bytes"] == 2 * 4 * 4 * (8 * 65 + 3 * (64 + 64 + 1))


def test_landmarks_after_contexts_of_several_sections(ran):
    words = [*SMALL, "--shapes", "llama", "gemma", "--backends", "landmark", "--lengths", 600]
    rows = ran(generation, *words)[0]["rows"]
    assert [row["shape"] for row in rows] == ["llama", "gemma"]
    assert all(row["error"] < 1e-4 and row["own_bytes"] > row["exact_bytes"] for row in rows)


def test_a_cache_that_forgets_is_not_timed(tmp_path, monkeypatch, capsys):
    read = favor.integrations.cache.StreamLayer.read

    def forget(self, options):
        state = read(self, options)
        if state.memory is not None:
            state.memory.summary.zero_()
        return state

    monkeypatch.setattr(favor.integrations.cache.StreamLayer, "read", forget)
    assert generation.main([*SMALL, "--lengths", "6", "--backends", "favor+", "--output_dir", str(tmp_path)]) == 1
    assert "6 tokens: the cache differs from a full pass by" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
