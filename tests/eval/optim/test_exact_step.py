"""The benchmark of the exact step: what it writes, and when it refuses."""

import json

import pytest

from favor.eval import exact_step


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(exact_step.torch, "set_num_threads", lambda count: None)


def test_writes_medians_and_ratios(tmp_path):
    words = ["--labels", "20", "40", "--inputs", "8", "--repeats", "3", "--output_dir", str(tmp_path)]
    assert exact_step.main(words) == 0
    result = json.loads((tmp_path / "exact_step.json").read_text())
    assert result["command"] == "python -m favor.eval.exact_step --labels 20 40 --inputs 8 --repeats 3"
    for row in result["labels"].values():
        times = row["milliseconds"]
        assert row["in_place_ratio"] == pytest.approx(times["exact_step_"] / times["SGD in place"])
        assert row["exact_ratio"] == pytest.approx(times["exact_step_"] / times["torch.optim.SGD"])
        assert row["optimizer_ratio"] == pytest.approx(times["ProxBoundSGD"] / times["torch.optim.SGD"])
        assert row["residual"] < 1e-9
    for check, name in zip(result["checks"], ("in_place_ratio", "exact_ratio", "optimizer_ratio"), strict=True):
        assert check["holds"] == all(row[name] <= exact_step.LIMIT for row in result["labels"].values())


def test_a_wrong_solution_is_not_timed(tmp_path, monkeypatch, capsys):
    original = exact_step.single_direction
    monkeypatch.setattr(exact_step, "single_direction", lambda *given: 1.001 * original(*given))
    assert exact_step.main(["--labels", "20", "30", "--output_dir", str(tmp_path)]) == 1
    assert "no times are given" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
