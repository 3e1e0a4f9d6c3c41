"""How programs talk to their user: errors in one line, near misses, Ctrl-C, checks before a model loads."""

import gzip
import os
import sys

import pytest
import transformers

from favor.train import clm, distill, glue, mlm
from favor.train.common import loop
from favor.train.common.program import program


@pytest.fixture
def start(monkeypatch, capsys):
    """Starts a program as a command line does; returns its exit code and what it said on stderr."""

    def call(module, *words, environment=()):
        for name in ("RANK", "ACCELERATE_MIXED_PRECISION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["program", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            module.cli()
        return ended.value.code or 0, capsys.readouterr().err

    return call


@pytest.fixture
def no_model(monkeypatch):
    """Makes it an error to load the weights of a model."""

    def load(*_, **__):
        raise AssertionError("a model was loaded")

    for kind in (transformers.AutoModelForMaskedLM, transformers.AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", load)
    monkeypatch.setattr(distill, "load_exact", load)


def assert_one_line(said, code, name, *parts):
    assert code == 2
    assert said.startswith(f"{name}: error: ")
    assert said.count("\n") == 1
    for part in parts:
        assert part in said


@pytest.fixture
def wrong_files(tmp_path):
    """Files and folders that are not what they are given for."""
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(10_000))[:500])
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"task_name": "rtte"}, ["unknown GLUE task 'rtte': did you mean rte? task_name must be one of cola"]),
        ({"attn_implementation": "favour#"}, ["got 'favour#': did you mean favor#?"]),
        ({"attn_implementation": "FAVOR+"}, ["did you mean favor+?"]),
        ({"model_name_or_path": "./nowhere"}, ["'./nowhere': there is no such folder here"]),
        (
            {"model_name_or_path": "out/nowhere"},
            ["'out/nowhere': there is no such folder here, and the hub gives none"],
        ),
        ({"model_name_or_path": "folder"}, ["which holds no config.json"]),
        ({"data_dir": "nowhere"}, ["data_dir must be an existing folder, got nowhere"]),
        ({"learning_rate": "fast"}, ["argument --learning_rate: invalid float value: 'fast'"]),
        ({"task_name": None}, ["the following arguments are required: --task_name"]),
        ({"num_feature": 3}, ["unknown option --num_feature: did you mean --num_features?"]),
        ({"something": 3}, ["unknown option --something: --help lists all"]),
    ],
)
def test_glue_names_what_is_wrong(changes, parts, start, bert_folder, glue_folder, wrong_files, no_model, monkeypatch):
    monkeypatch.chdir(wrong_files)
    settings = {"model_name_or_path": bert_folder, "task_name": "sst2", "data_dir": glue_folder, "output_dir": "run"}
    given = {name: value for name, value in {**settings, **changes}.items() if value is not None}
    code, said = start(glue, *(word for name, value in given.items() for word in (f"--{name}", value)))
    assert_one_line(said, code, "favor-glue", *parts)
    assert not (wrong_files / "run").exists()


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("nothing.txt", "expected a text file, got nothing.txt, which is not there"),
        ("folder", "which is a folder"),
        ("empty.txt", "empty.txt holds no text"),
        ("bytes.txt", "bytes.txt cannot be read as UTF-8 text"),
        ("cut.txt.gz", "cut.txt.gz cannot be read as UTF-8 text"),
    ],
)
@pytest.mark.parametrize("name", ["favor-mlm", "favor-clm", "favor.train.distill"])
def test_texts_are_checked_before_the_model(name, file, part, start, bert_folder, wrong_files, no_model, monkeypatch):
    monkeypatch.chdir(wrong_files)
    module = {"favor-mlm": mlm, "favor-clm": clm}.get(name, distill)
    code, said = start(module, "--model_name_or_path", bert_folder, "--train_file", file, "--output_dir", "run")
    assert_one_line(said, code, name, part)


def test_debug_shows_where(start, bert_folder, monkeypatch):
    words = ["--model_name_or_path", str(bert_folder), "--task_name", "rtte", "--output_dir", "run"]
    monkeypatch.setattr(sys, "argv", ["program", *words, "--debug"])
    with pytest.raises(ValueError, match="unknown GLUE task 'rtte'"):
        glue.cli()
    assert sys.argv == ["program", *words]
    assert "(--debug shows where)" in start(glue, *words)[1]


def test_ctrl_c_says_how_to_go_on(start, bert_folder, glue_folder, tmp_path, monkeypatch):
    original = loop.checkpoint.save_checkpoint

    def press(*given):
        original(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.checkpoint, "save_checkpoint", press)
    words = ["--model_name_or_path", bert_folder, "--task_name", "sst2", "--data_dir", glue_folder]
    words += ["--output_dir", tmp_path / "run", "--max_train_steps", 9, "--checkpointing_steps", 6]
    code, said = start(glue, *words)
    assert code == 130
    assert said.splitlines()[-1] == "favor-glue: stopped at step 6; continue with --resume, from checkpoint-6"
    assert "Traceback" not in said
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint*")) == ["checkpoint-6"]


def run_of(main):
    """A module with nothing but a program."""

    class Module:
        cli = staticmethod(program("name", main))

    return Module


def test_what_is_no_mistake_of_the_user_keeps_its_traceback(start):
    def fail():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_of(fail).cli()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\n  two"), "name: error: one two (--debug shows where)\n"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), "name: error: x.txt: No such file or directory ("),
        (OSError(), "name: error: OSError ("),
        (KeyboardInterrupt(), "\nname: stopped\n"),
    ],
)
def test_errors_become_lines(error, said, start):
    def fail():
        raise error

    code, found = start(run_of(fail))
    assert found.startswith(said)
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)


def test_exit_codes_are_those_of_the_program(start):
    assert start(run_of(lambda: 3))[0] == 3
    assert start(run_of(lambda: {"metrics": 1}))[0] == 0
    # Under a launcher the lines that follow are not ours.
    said = start(run_of(lambda: int("x")), environment={"ACCELERATE_MIXED_PRECISION": "no"})[1]
    assert said.endswith("; the lines below are from accelerate launch\n")
