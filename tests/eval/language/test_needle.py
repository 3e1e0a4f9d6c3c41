"""The program that looks for needles: its files, and runs that are stopped, divided and put together."""

import json

import pytest

from favor.eval.language import needle, needle_report


@pytest.fixture
def words(folder, novel_file, tmp_path):
    sizes = ["--lengths", "150", "300", "--cases", "4", "--depths", "2", "--tasks", "single"]
    variants = ["--backends", "exact", "landmark:selected_keys=32"]
    return [str(folder), "--text", str(novel_file), *sizes, *variants, "--output_dir", str(tmp_path / "out")]


def content(words):
    found = json.loads((needle_report.Path(words[-1]) / "needle.json").read_text())
    return {key: found[key] for key in ("cells", "variants", "model")}


def test_writes_tables_and_a_heat_map(words, tmp_path):
    words[words.index("single") : words.index("single") + 1] = ["single", "multikey"]
    words[words.index("150") : words.index("300") + 1] = ["500", "600"]
    assert needle.main(words) == 0
    cells = content(words)["cells"]
    assert [(c["task"], c["variant"], c["length"]) for c in cells] == [
        (task, variant, length)
        for task in ("single", "multikey")
        for variant in ("exact", "landmark:selected_keys=32")
        for length in (500, 600)
    ]
    assert [c["answers"] for c in cells] == [4] * 4 + [16] * 4
    assert all(0 <= c["accuracy"] <= 1 < c["nats"] and sorted(c["by_depth"]) == ["0.25", "0.75"] for c in cells)
    assert (tmp_path / "out" / "needle.png").stat().st_size > 1000
    text = (tmp_path / "out" / "needle.md").read_text()
    assert "## multikey" in text
    assert "landmark:selected_keys=32 finds at least 95 % of what exact finds" in text


def test_a_run_that_was_stopped_goes_on_and_gives_the_same(words, tmp_path, monkeypatch):
    needle.main(words)
    first, records = content(words), tmp_path / "out" / "needle.jsonl"
    lines = records.read_text().splitlines()
    assert len(lines) == 16
    records.write_text("\n".join([*lines[:9], lines[9][:30]]))
    answered, real = [], needle.answer
    monkeypatch.setattr(needle, "answer", lambda *given: answered.append(1) or real(*given))
    needle.main(words)
    assert len(answered) == 7
    assert content(words) == first


def test_parts_of_the_cases_put_together_are_the_whole(words, tmp_path, monkeypatch):
    needle.main(words)
    whole, out = content(words), tmp_path / "out"
    for part, cases in (("a", "0:1"), ("b", "1:4")):
        needle.main([*words, "--name", part, "--cases", cases])
    (out / "needle.jsonl").unlink()
    monkeypatch.setattr(needle, "answer", None)  # nothing is left to be asked
    needle.main([*words[:-2], "--merge", str(out / "a.jsonl"), str(out / "b.jsonl"), *words[-2:]])
    assert content(words) == whole


def test_all_tasks_are_asked_of_one_document(words):
    at = words.index("single")
    words[at : at + 1] = ["single", "multikey", "multivalue", "tracking", "--together"]
    words[words.index("150") : words.index("300") + 1] = ["900"]
    words[words.index("4")] = "2"
    needle.main(words)
    assert [(c["task"], c["answers"]) for c in content(words)["cells"][::2]] == [
        ("single", 2),
        ("multikey", 8),
        ("multivalue", 2),
        ("tracking", 2),
    ]


def test_records_that_are_not_there_are_refused(words, tmp_path):
    with pytest.raises(ValueError, match="which is not there"):
        needle.main([*words, "--merge", str(tmp_path / "none.jsonl")])


def test_heat_map_has_the_mean_of_each_depth_and_length():
    cells = needle_report.Cells(["exact"], [10, 20], ["single"])
    for length, case, depth, score in ((10, 0, 0.25, 1), (10, 1, 0.25, 0), (10, 2, 0.75, 1), (20, 0, 0.25, 0)):
        found = {"task": "single", "depth": depth, "score": score, "nats": 1.0}
        cells.add("exact", length, case, {"answers": [found], "seconds": [1.0, 2.0]})
    assert cells.by_depth("exact", "single") == {0.25: {10: 0.5, 20: 0.0}, 0.75: {10: 1.0}}
