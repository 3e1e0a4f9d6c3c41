"""What `--resume` reads: files without code, the last checkpoint that is whole, and words for everything else."""

import errno
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from stopping import same_weights

from favor.train import distill, glue
from favor.train.common import checkpoint, state

PARTS = ("model", "optimizer", "scheduler", "progress", "redraws", "process_0")
SETTINGS = {"max_train_steps": 6, "checkpointing_steps": 2}


class Evil:
    """Pickled, it leaves a file behind wherever it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the two runs below are trained, once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def stopped(train, kept, tmp_path, monkeypatch):
    """A run that ended after step 4 of 6; the folder `whole` beside it has one that was not stopped."""

    def stop_at(self, name, value, original=checkpoint.Progress.__setattr__):
        if name == "step" and value > 4:
            raise KeyboardInterrupt
        original(self, name, value)

    if not (kept / "whole").exists():
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.Progress, "__setattr__", stop_at)
            with pytest.raises(KeyboardInterrupt, match="stopped at step 4; continue with --resume, from checkpoint-4"):
                train(output=kept / "run", **SETTINGS)
        train(output=kept / "whole", **SETTINGS)
    for name in ("run", "whole"):
        shutil.copytree(kept / name, tmp_path / name)
    return tmp_path / "run"


def test_a_checkpoint_is_json_and_safetensors(stopped):
    names = {path.name for path in (stopped / "checkpoint-4").iterdir()}
    assert names == {"settings.json", *(f"{part}.{kind}" for part in PARTS for kind in ("json", "safetensors"))}


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def poison(path):
    torch.save({"x": Evil(path.parent / "trace")}, path)


HARMS = {"half": truncate, "gone": Path.unlink, "poisoned": poison}
HARMS |= {"empty": lambda path: path.write_bytes(b""), "deep": lambda path: path.write_text("[" * 100_000)}


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_cannot_be_read_is_named_and_never_run(harm, kind, tmp_path):
    state.write(tmp_path, "model", {"weight": torch.ones(4), "names": ["a", "b"]})
    HARMS[harm](tmp_path / f"model.{kind}")
    with pytest.raises(state.DamagedError, match=rf"model\.{kind} cannot be read"):
        state.read(tmp_path, "model")
    assert not (tmp_path / "trace").exists()


OLD = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "pytorch_model.bin")
TRAINER = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth")


@pytest.mark.parametrize("flags", [(), ("resume",), ("overwrite_output_dir",)])
@pytest.mark.parametrize("names", [OLD, TRAINER])
def test_checkpoints_of_others_are_refused_and_stay(names, flags, train, tmp_path):
    """Those of an earlier favor are pickles, those of a trainer of transformers have the same names as ours."""
    folder = tmp_path / "run" / "checkpoint-500"
    folder.mkdir(parents=True)
    for name in names:
        torch.save({"x": Evil(tmp_path / "trace")}, folder / name)
    with pytest.raises(ValueError, match=r"checkpoint-500 was written by another program, .* choose another"):
        train(flags=flags, **SETTINGS)
    assert not (tmp_path / "trace").exists()
    assert {path.name for path in folder.iterdir()} == set(names)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint-500"]


def test_stages_of_a_distillation_are_folders_too(bert_folder, text, tmp_path):
    (tmp_path / "attention" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "attention" / "checkpoint-5" / "trainer_state.json").touch()
    words = ["--model_name_or_path", str(bert_folder), "--train_file", str(text), "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="attention/checkpoint-5 was written by another program"):
        distill.main([*words, "--overwrite_output_dir"])


def test_a_new_start_removes_what_the_run_wrote_and_nothing_else(stopped, train):
    others = ["checkpoints-of-my-other-model/model.safetensors", "checkpoint-best/notes.txt", "checkpoint.txt"]
    for name in others:
        (stopped / name).parent.mkdir(exist_ok=True)
        (stopped / name).write_text("mine")
    shutil.copytree(stopped / "checkpoint-2", stopped / "checkpoint-2.damaged")
    (stopped / "checkpoint.partial").mkdir()
    (stopped / "checkpoint.partial" / "settings.json").write_text("{}")
    train(flags=("overwrite_output_dir",), max_train_steps=1)
    assert sorted(path.name for path in stopped.glob("checkpoint*")) == sorted({name.split("/")[0] for name in others})
    assert all((stopped / name).read_text() == "mine" for name in others)


def test_a_model_settings_and_a_card_of_others_stay(train, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.safetensors").write_text("mine")
    for flags in ((), ("resume",)):
        with pytest.raises(ValueError, match=r"model\.safetensors is the model of another .*--overwrite_output_dir"):
            train(flags=flags)
    assert (run / "model.safetensors").read_text() == "mine"
    (run / "settings.json").write_text('{"editor": 1}')
    with pytest.raises(ValueError, match=r"settings\.json was written by another program"):
        train(flags=("overwrite_output_dir",))
    (run / "settings.json").unlink()
    (run / "README.md").write_text("mine")
    train(flags=("overwrite_output_dir",), max_train_steps=1)
    assert "README.md is not of this program and stays: the model card is MODEL_CARD.md" in capsys.readouterr().out
    assert (run / "README.md").read_text() == "mine"
    assert "favor" in (run / "MODEL_CARD.md").read_text()


def truncate_two(folder):
    """Three are there if the run was killed before it removed the first."""
    shutil.copytree(folder, folder.with_name("checkpoint-3"))
    for name in ("checkpoint-3", folder.name):
        truncate(folder.with_name(name) / "model.safetensors")


def dangle(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "nowhere")


DAMAGE = {
    "file": lambda folder: poison(folder / "process_0.json"),
    "progress": lambda folder: (folder / "progress.json").write_text('{"dict": [["step", 4]]}'),
    "model of another shape": lambda folder: state.write(folder, "model", {"weight": torch.ones(2)}),
    "two": truncate_two,
    "link": dangle,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, stopped, train, capsys):
    DAMAGE[damage](stopped / "checkpoint-4")
    train(flags=("resume",), **SETTINGS)
    printed = capsys.readouterr().out
    assert f"WARNING: {stopped / 'checkpoint-4'} cannot be used: " in printed
    assert "continuing from checkpoint-2" in printed
    assert same_weights(stopped, stopped.parent / "whole")
    # Those that were written since are the ones to go on from.
    assert [path.name for path in checkpoint.checkpoints(stopped)] == ["checkpoint-4", "checkpoint-6"]
    assert not list(stopped.rglob("trace"))


def test_last_two_checkpoints_stay_and_a_half_written_one_is_never_taken(stopped, train, monkeypatch):
    original = os.replace

    def killed(source, target):
        if Path(target).name == "checkpoint-6":
            raise RuntimeError("killed")
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(flags=("resume",), **SETTINGS)
    names = sorted(path.name for path in stopped.glob("checkpoint*"))
    assert names == ["checkpoint-2", "checkpoint-4", "checkpoint.partial"]
    train(flags=("resume",), **SETTINGS)
    assert same_weights(stopped, stopped.parent / "whole")
    assert sorted(path.name for path in stopped.glob("checkpoint*")) == ["checkpoint-4", "checkpoint-6"]


def test_without_a_whole_checkpoint_there_is_one_error(stopped, train):
    for folder in checkpoint.checkpoints(stopped):
        truncate(folder / "model.safetensors")
    message = r"no checkpoint in .*run can be used: checkpoint-4: model\.safetensors .*; checkpoint-2: .*--overwrite"
    with pytest.raises(ValueError, match=message):
        train(flags=("resume",), **SETTINGS)
    assert train(flags=("overwrite_output_dir",), **SETTINGS)["steps"] == 6
    assert same_weights(stopped, stopped.parent / "whole")


def test_damaged_settings_and_results_are_named(stopped, train):
    truncate(stopped / "settings.json")
    with pytest.raises(ValueError, match=r"run/settings\.json is damaged"):
        train(flags=("resume",), **SETTINGS)
    truncate(stopped.parent / "whole" / "all_results.json")
    with pytest.raises(ValueError, match=r"all_results\.json is damaged"):
        train(output="whole", flags=("resume",), **SETTINGS)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(error, stopped, train, monkeypatch):
    original = state.save_file

    def full(tensors, path):
        if path.parent.name == "checkpoint.partial" and full.left == 0:
            path.write_bytes(b"half")
            raise error
        full.left -= 1
        original(tensors, path)

    full.left = 1
    monkeypatch.setattr(state, "save_file", full)
    message = (
        r"cannot write .*checkpoint-6: .*No space left.* MB are free; checkpoint-4 is whole: continue from it with"
    )
    with pytest.raises(OSError, match=message):
        train(flags=("resume",), **SETTINGS)
    assert sorted(path.name for path in stopped.glob("checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    monkeypatch.undo()
    train(flags=("resume",), **SETTINGS)
    assert same_weights(stopped, stopped.parent / "whole")


def test_ctrl_c_while_a_checkpoint_is_written_leaves_no_half_of_it(train, tmp_path, monkeypatch):
    original = state.save_file

    def interrupted(tensors, path):
        original(tensors, path)
        if path.name == "scheduler.safetensors":
            raise KeyboardInterrupt

    monkeypatch.setattr(state, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 2; it has no checkpoint to continue from"):
        train(**SETTINGS)
    assert not list((tmp_path / "run").glob("checkpoint*"))


def test_a_model_that_is_spread_over_processes_has_no_checkpoints():
    def states(kind):
        return checkpoint.States(SimpleNamespace(distributed_type=kind, scaler=None), {})

    states(DistributedType.MULTI_GPU).check()
    with pytest.raises(ValueError, match="every process holds as a whole, got FSDP: leave out --checkpointing_steps"):
        states(DistributedType.FSDP).check()


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def test_every_kind_of_value_comes_back_as_it_was(tmp_path):
    base = torch.arange(6, dtype=torch.float64).view(2, 3)
    tree = {
        "a.b": {"c": torch.zeros(2)},
        "a": {"b.c": torch.ones(2), 3: [(), [], {}, None, True, 1, 1.5, "text", float("inf"), 1e-310, 2**70]},
        "views": (base, base.T, base[:, 1], base, base[:0], base[0], torch.tensor(3), torch.tensor(True)),
        "kinds": [torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.int64, torch.uint8)],
    }
    state.write(tmp_path, "tree", tree)
    found = state.read(tmp_path, "tree")
    assert equal(found, tree)
    assert found["views"][0] is found["views"][3]
    with pytest.raises(TypeError, match=r"tree\.a: a checkpoint holds numbers, texts, tensors"):
        state.write(tmp_path, "tree", {"a": threading.Lock()})
    with pytest.raises(TypeError, match="tree: keys must be"):
        state.write(tmp_path, "tree", {(1, 2): 0})


def test_random_numbers_go_on_where_they_were(tmp_path):
    import random

    import numpy as np

    def draw():
        return random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()

    draw()
    state.write(tmp_path, "random", state.random_state())
    expected = draw()
    state.restore_random_state(state.read(tmp_path, "random"))
    assert draw() == expected


def test_no_program_reads_pickles():
    """`--resume` and all that belongs to it."""
    root = Path(glue.__file__).parent
    for path in root.rglob("*.py"):
        content = path.read_text()
        for name in ("torch.load", "load_state(", "save_state(", "pickle=True", "import pickle", "np.load", "dill"):
            assert name not in content, f"{path}: {name}"
