"""A visit to a GPU: outcomes are written, not repeated, and none holds up the others; on a CPU with tiny sizes."""

import json
import time
from pathlib import Path

import pytest
import torch

import favor
from favor.eval import generation, gpu
from favor.eval.speed import __main__ as speed

# A program that writes a page, fails, or waits with another process that waits.
PROGRAM = """
import pathlib, subprocess, sys, time

what, folder, name = sys.argv[1], sys.argv[-3], sys.argv[-1]
print("begins", what)
if what == "fails":
    raise ValueError("no such thing")
if what == "waits":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path(folder, "child").write_text(str(child.pid))
    time.sleep(60)
pathlib.Path(folder, name + ".md").write_text("# A table\\n")
"""


@pytest.fixture
def visit(tmp_path, monkeypatch, capsys):
    """Gives a function that makes a dry visit: exit code, outcomes by step, the page, and what is said."""
    folder = tmp_path / "out"

    def call(*words):
        code = gpu.main(["--dry_run", "--output_dir", str(folder), *map(str, words)])
        steps = json.loads((folder / "gpu.json").read_text())["steps"]
        statuses = {name: outcome["status"] for name, outcome in steps.items()}
        return code, statuses, (folder / "gpu.md").read_text(), capsys.readouterr().out

    return call


@pytest.fixture
def small_steps(tmp_path, monkeypatch):
    (tmp_path / "a_step.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kinds = {"fails": 20, "waits": 0.75, "works": 20, "long": 1e6}
    steps = [gpu.Step(name, ["a_step", name], seconds, []) for name, seconds in kinds.items()]
    monkeypatch.setattr(gpu, "TUNING", gpu.Step("tuning", [], 0, [], ("no_such_module",)))
    absent = gpu.Step("absent", ["a_step", "works"], 20, [], ("no_such_module",))
    monkeypatch.setattr(gpu, "STEPS", [*steps, absent, gpu.Step("reads", lambda folder: "nothing to read", 20, [])])


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_no_step_holds_up_the_others_and_none_is_repeated(visit, small_steps, tmp_path, monkeypatch):
    code, statuses, page, said = visit("--seconds", 60)
    assert code == 1
    skipped = dict.fromkeys(("absent", "tuning"), "skipped") | {"reads": "not run"}
    assert statuses == {"fails": "failed", "waits": "stopped", "works": "done", "long": "not run", **skipped}
    assert "for the next visit: long reads\n" in said
    assert "reads: nothing to read\n" in said
    assert "ValueError: no such thing" in page
    assert "## works: done\n\n### A table" in page
    assert "not installed: no_such_module" in page
    child, stop = int((tmp_path / "out/child").read_text()), time.monotonic() + 10
    while is_running(child) and time.monotonic() < stop:
        time.sleep(0.05)
    assert not is_running(child)
    records = (tmp_path / "out/gpu.jsonl").read_text()
    assert len(records.strip().splitlines()) == 5
    monkeypatch.setattr(gpu, "run", None)  # a second visit has nothing to run
    assert visit("--seconds", 60)[:3] == (1, statuses, page)
    assert (tmp_path / "out/gpu.jsonl").read_text() == records


def test_another_commit_and_the_end_of_a_visit_repeat_a_step(visit, small_steps, monkeypatch):
    # More than its 0.75 seconds are left, but not twice as many.
    code, statuses, _, said = visit("--seconds", 1.2, "--only", "waits")
    assert (code, statuses["waits"]) == (0, gpu.OUT_OF_TIME)
    assert "for the next visit: waits" in said
    assert visit("--seconds", 60, "--only", "waits")[1]["waits"] == "stopped"
    monkeypatch.setattr(gpu, "state_of_code", lambda: "another")
    assert set(visit("--seconds", 0.5, "--only", "waits")[1].values()) == {"not run"}


def test_code_without_git_is_known_by_its_files(tmp_path, monkeypatch):
    assert len(gpu.state_of_code()) >= 12
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    first = gpu.state_of_code()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text("x = 1")
    assert first.startswith(f"{favor.__version__}-")
    assert gpu.state_of_code() != first


def test_the_words_of_every_step_are_known(tmp_path):
    """Those of a GPU and of a dry run; and tests that are named exist."""
    cell = {"panel": "causal, forward", "method": "favor:pos@128", "length": 64, "timing": {"median": 1.0}}
    (tmp_path / "methods_x.json").write_text(json.dumps({"cells": [cell] * 3}))
    assert gpu.slowest(tmp_path, 1).startswith("no method to profile")
    for step in (gpu.TUNING, *gpu.STEPS):
        for dry in (False, True):
            words = step.command(tmp_path, dry)
            if words[:2] == ["-m", "pytest"]:
                path = next(word for word in words if word.startswith("tests/"))
                assert (gpu.ROOT / path).exists()
            elif isinstance(words, list):
                parse = {"favor.eval.speed": speed, "favor.eval.generation": generation}[words[1]].parse_arguments
                assert parse(words[2:]).name == step.name
            else:
                assert step.name in ("fla", "profile_2", "profile_3")


def test_it_asks_for_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "expected a GPU, got none; use --dry_run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run(visit, monkeypatch):
    """One step of each kind, in this process."""

    def run(words, limit, log, environment):
        log.touch()
        return {"favor.eval.speed": speed}[words[1]].main(words[2:])

    monkeypatch.setattr(gpu, "run", run)
    names = ["methods_causal_decode", "profile_1", "fla"]
    code, statuses, page, _ = visit("--seconds", 900, "--only", *names)
    assert code == 0, page
    assert {statuses[name] for name in names[:-1]} == {"done"}
    assert statuses["fla"] in ("skipped", "done")
    assert statuses["models_bert"] == "not run"
    assert "#### Causal, decode" in page
    assert "Profile of a pass of favor:" in page
    assert "flex skipped from L = 64 on: it is measured on a GPU alone" in page
