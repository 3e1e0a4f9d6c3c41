"""The program that looks for needles: its files, the means of its table, and runs that are stopped."""

import json

import pytest

from favor.eval.language import needle

BACKENDS = ("exact", "landmark:selected_keys=32")


@pytest.fixture
def run(folder, novel_file, tmp_path, monkeypatch):
    """Gives a function that runs the program; it returns the content of the JSON file without times."""
    monkeypatch.setattr(needle, "DEPTHS", 2)

    def call(*words):
        where = ["--text", str(novel_file), "--output_dir", str(tmp_path / "out"), "--backends", *BACKENDS]
        assert needle.main([str(folder), *where, "--cases", "4", *words]) == 0
        found = json.loads((tmp_path / "out" / "needle.json").read_text())
        return {key: found[key] for key in ("cells", "variants", "model")}

    return call


def test_the_table(run, tmp_path):
    cells = run("--lengths", "600", "500", "--tasks", "single", "multikey")["cells"]
    assert [(c["task"], c["variant"], c["length"]) for c in cells] == [
        (task, variant, length) for task in ("single", "multikey") for variant in BACKENDS for length in (500, 600)
    ]
    assert [c["answers"] for c in cells] == [4] * 4 + [16] * 4
    assert all(0 <= c["accuracy"] <= 1 < c["nats"] and sorted(c["by_depth"]) == ["0.25", "0.75"] for c in cells)
    text = (tmp_path / "out" / "needle.md").read_text()
    assert "## multikey" in text
    assert "landmark:selected_keys=32 finds at least 95 % of what exact finds" in text


def test_a_run_that_was_stopped_goes_on_and_gives_the_same(run, tmp_path, monkeypatch):
    words = ["--lengths", "150", "300", "--tasks", "single"]
    first, records = run(*words), tmp_path / "out" / "needle.jsonl"
    lines = records.read_text().splitlines()
    assert len(lines) == 17  # the first is empty
    records.write_text("\n".join([*lines[:10], lines[10][:30]]))
    answered, real = [], needle.answer
    monkeypatch.setattr(needle, "answer", lambda *given: answered.append(1) or real(*given))
    assert run(*words) == first
    assert len(answered) == 7
    assert run(*words) == first
    assert len(answered) == 7


def test_all_tasks_are_asked_of_one_document(run):
    tasks = ["single", "multikey", "multivalue", "tracking"]
    cells = run("--lengths", "900", "--tasks", *tasks, "--together", "--cases", "2")["cells"]
    assert [(c["task"], c["answers"]) for c in cells[::2]] == list(zip(tasks, (2, 8, 2, 2), strict=True))


def test_means_of_each_depth():
    answers = [
        {"depth": depth, "score": score, "nats": 1.0 + score} for depth, score in ((0.25, 1), (0.25, 0), (0.75, 1))
    ]
    cell = needle.cell(("single", "exact", 10), answers)
    assert cell["by_depth"] == {"0.25": 0.5, "0.75": 1.0}
    assert (cell["accuracy"], cell["nats"]) == (pytest.approx(2 / 3), pytest.approx(5 / 3))
    assert needle.cell(("tracking", "exact", 10), [{"depth": None, "score": 1, "nats": 1.0}])["by_depth"] == {}
