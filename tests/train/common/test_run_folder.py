"""Folders of runs: two programs never write to one; what `--resume` reads, and words for everything else."""

import errno
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import launching
import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from stopping import same_weights
from test_programs import programs

from favor.train import distill
from favor.train.common import checkpoint, state
from favor.train.common.lock import NAME, locked

REFUSED = r"another run writes to .*run: wait until it ends, stop it, or choose another --output_dir"
# Options of each program that fills a folder; `main` gets no further than the lock.
WORDS = {
    "favor.train.glue": "--model_name_or_path {bert} --task_name sst2 --data_dir {glue} --seed 1 2",
    "favor.train.mlm": "--model_name_or_path {bert} --train_file {text}",
    "favor.train.clm": "--model_name_or_path {bert} --train_file {text}",
    "favor.train.distill": "--model_name_or_path {bert} --train_file {text}",
    "favor.train.asr": "--data_dir {tmp}",
    "favor.train.nst": "--unlabelled_dir {tmp}",
    "favor.eval.asr": "--model_name_or_path {bert} --data_dir {tmp}",
    "favor.eval.glue": "--model_name_or_path {bert} --tasks sst2 --data_dir {glue}",
    "favor.eval.papers.wer_by_features": "--data_dir {tmp} --backends favor+ --name wer",
}


@pytest.mark.parametrize("program", sorted(WORDS.keys() | {name for name in programs() if "favor.train." in name}))
def test_no_program_writes_beside_another(program, bert_folder, glue_folder, text, tmp_path):
    flags = ["--resume"] if program.startswith("favor.train") else []
    name = program + (".__main__" if program == "favor.eval.glue" else "")
    places = {"bert": bert_folder, "glue": glue_folder, "text": text, "tmp": tmp_path}
    words = [word.format(**places) for word in WORDS[program].split(" ")]  # a path may have spaces
    with locked(tmp_path / "run"):
        before = sorted((tmp_path / "run").rglob("*"))
        with pytest.raises(ValueError, match=REFUSED):
            importlib.import_module(name).main([*words, "--output_dir", str(tmp_path / "run"), *flags])
        assert sorted((tmp_path / "run").rglob("*")) == before
    assert not (tmp_path / "run").exists()


def hold(folder, ready):
    """Holds a lock, as does a worker that is forked meanwhile, until both are killed."""
    with locked(folder):
        worker = os.fork()
        if worker:
            ready.send(worker)
        time.sleep(launching.SECONDS)


def test_a_killed_run_blocks_nobody(tmp_path):
    """Not even while a worker of it still lives."""
    here, there = multiprocessing.Pipe()
    holder = launching._context.Process(target=hold, args=(tmp_path, there))
    holder.start()
    worker = here.recv()
    try:
        with pytest.raises(ValueError, match="another run writes to"), locked(tmp_path):
            pass
        holder.kill()
        holder.join()
        assert (tmp_path / NAME).exists()
        os.kill(worker, 0)
        with locked(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_all_processes_of_a_run_end(bert_folder, text, tmp_path):
    """Two processes, of which one has the lock refused: neither waits for the other."""
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    words = ["--model_name_or_path", bert_folder, "--train_file", text, "--output_dir", tmp_path / "run"]
    with locked(tmp_path / "run"):
        started = launching.start("favor.train.mlm", words, logs)
        for process in started:
            process.join(60)
    assert [process.exitcode for process in started] == [2, 2]
    assert "error: another run writes to" in logs[0].read_text()


def test_a_folder_is_free_and_as_it_was_after_an_error(tmp_path):
    folder = tmp_path / "new" / "run"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), locked(folder):
            raise KeyboardInterrupt
        assert not folder.parent.exists()
    with locked(folder):
        (folder / "file").touch()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_folders_that_cannot_be_written_or_locked_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write to .*file \(.*\): choose another"), locked(tmp_path / "file"):
        pass

    def refuse(*_):
        raise OSError(numbers[0], os.strerror(numbers.pop(0)))

    monkeypatch.setattr("fcntl.flock", refuse)
    numbers = [errno.ENOLCK, errno.ENOSYS, errno.EIO]
    while len(numbers) > 1:
        with pytest.warns(UserWarning, match="on a file system without locks: make sure yourself"), locked(tmp_path):
            (tmp_path / "written").touch()
    with pytest.raises(OSError, match=r"cannot write to .*Input/output error"), locked(tmp_path):
        pass


PARTS = ("model", "optimizer", "scheduler", "progress", "redraws", "process_0")
SETTINGS = {"max_train_steps": 6, "checkpointing_steps": 2}


class Evil(str):
    """Pickled, it leaves a folder of this name behind wherever it is loaded."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


@pytest.fixture
def stopped(train, tmp_path_factory, tmp_path, monkeypatch):
    """A run that ended after step 4 of 6; the folder `whole` beside it has one that was not stopped."""
    kept = tmp_path_factory.getbasetemp() / "kept"  # where both are trained, once

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
    given = {"model_name_or_path": bert_folder, "train_file": text, "output_dir": tmp_path}
    with pytest.raises(ValueError, match="attention/checkpoint-5 was written by another program"):
        distill.main([*launching.options(given), "--overwrite_output_dir"])


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


def truncate_two(folder):  # three are there if the run was killed before it removed the first
    shutil.copytree(folder, folder.with_name("checkpoint-3"))
    for name in ("checkpoint-3", folder.name):
        truncate(folder.with_name(name) / "model.safetensors")


DAMAGE = {
    "file": lambda folder: poison(folder / "process_0.json"),
    "progress": lambda folder: (folder / "progress.json").write_text('{"dict": [["step", 4]]}'),
    "model of another shape": lambda folder: state.write(folder, "model", {"weight": torch.ones(2)}),
    "two": truncate_two,
    "link": lambda folder: shutil.rmtree(folder) or folder.symlink_to(folder.parent / "nowhere"),
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


def test_what_is_damaged_is_named_and_without_a_whole_checkpoint_there_is_one_error(stopped, train):
    names = {path.name for path in (stopped / "checkpoint-4").iterdir()}
    assert names == {"settings.json", *(f"{part}.{kind}" for part in PARTS for kind in ("json", "safetensors"))}
    for folder in checkpoint.checkpoints(stopped):
        truncate(folder / "model.safetensors")
    message = r"no checkpoint in .*run can be used: checkpoint-4: model\.safetensors .*; checkpoint-2: .*--overwrite"
    with pytest.raises(ValueError, match=message):
        train(flags=("resume",), **SETTINGS)
    assert train(flags=("overwrite_output_dir",), **SETTINGS)["steps"] == 6
    assert same_weights(stopped, stopped.parent / "whole")
    truncate(stopped / "settings.json")
    with pytest.raises(ValueError, match=r"run/settings\.json is damaged"):
        train(flags=("resume",), **SETTINGS)
    truncate(stopped.parent / "whole" / "all_results.json")
    with pytest.raises(ValueError, match=r"all_results\.json is damaged"):
        train(output="whole", flags=("resume",), **SETTINGS)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("I/O error: No space left")])
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
    with pytest.raises(OSError, match=r"cannot write .*-6: .*No space left.* MB are free; checkpoint-4 is whole: cont"):
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
    def draw():
        return random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()

    draw()
    state.write(tmp_path, "random", state.random_state())
    expected = draw()
    state.restore_random_state(state.read(tmp_path, "random"))
    assert draw() == expected
