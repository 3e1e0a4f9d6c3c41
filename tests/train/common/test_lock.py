"""Two programs never write to one folder at the same time."""

import errno
import importlib
import multiprocessing
import os
import signal
import time

import launching
import pytest
from test_programs import programs

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


def test_every_training_is_tried_below():
    assert {name for name in programs() if name.startswith("favor.train.")} <= set(WORDS)


@pytest.mark.parametrize("program", WORDS)
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
