"""The benchmark of the Transducer loss: what it writes, its plain reference, and when it refuses."""

import json

import pytest
import torch

from favor.eval import transducer_loss as program

TINY = ["--sizes", "2x6x3x9", "--repeats", "2", "--width", "8", "--max_cells", "8"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(program.torch, "set_num_threads", lambda count: None)


def test_naive_loss_of_two_frames_and_one_label():
    logits = torch.randn(1, 2, 2, 3, dtype=torch.float64)
    p = logits.softmax(-1)[0]
    ways = p[0, 0, 2] * p[0, 1, 0] * p[1, 1, 0] + p[0, 0, 0] * p[1, 0, 2] * p[1, 1, 0]
    torch.testing.assert_close(program.naive(logits, torch.tensor([[2]])), -ways.log())


def test_writes_times_and_peaks(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        program,
        "isolated_peaks",
        lambda requests, threads: asked.extend(requests) or [7000, 6000, 3000][: len(requests)],
    )
    assert program.main([*TINY, "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "transducer_loss.json").read_text())
    assert result["command"] == "python -m favor.eval.transducer_loss " + " ".join(TINY)
    names = ["naive", "transducer_loss (torch)", "joint_transducer_loss (torch)"]
    assert [row["method"] for row in result["logits"]] == names[:2]
    assert [row["method"] for row in result["networks"]] == names
    for row in result["logits"] + result["networks"]:
        assert row["seconds"]["median"] > 0
        assert row["error"] < 1e-5
        assert row["logits_bytes"] == 4 * 2 * 6 * 4 * 9
    assert len(asked) == 5
    text = (tmp_path / "transducer_loss.md").read_text()
    assert all(f"| {name} |" in text for name in names)
    peaks, times = [check["holds"] for check in result["checks"]][::2], result["checks"][1::2]
    assert peaks == [False, True]
    for check, table, name in zip(times, ("logits", "networks"), names[1:], strict=True):
        naive, *ours = (row["seconds"]["median"] for row in result[table] if row["method"] in ("naive", name))
        assert check["holds"] == (naive >= ours[0])


@pytest.mark.slow
def test_peaks_come_from_processes_of_their_own(tmp_path):
    if problem := program.measure.MemoryServer.problem():
        pytest.skip(problem)
    words = ["--sizes", "2x40x15x1200", "--repeats", "1", "--width", "8", "--max_cells", "500"]
    assert program.main([*words, "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "transducer_loss.json").read_text())
    shares = [row["peak_bytes"] / row["logits_bytes"] for row in result["logits"] + result["networks"]]
    naive, ours, naive_joint, our_joint, lean = shares
    assert 0.9 < ours < 1.7 < 2.5 < naive
    assert lean < 1 < our_joint < naive_joint


def test_a_wrong_loss_is_not_timed(tmp_path, monkeypatch, capsys):
    original = program.transducer_loss
    monkeypatch.setattr(program, "transducer_loss", lambda *args, **options: 1.001 * original(*args, **options))
    assert program.main([*TINY, "--output_dir", str(tmp_path)]) == 1
    assert "2x6x3x9, transducer_loss (torch): relative error 1.0e-03: no times are given" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
