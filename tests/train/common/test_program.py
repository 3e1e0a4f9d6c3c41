"""How programs talk to their user: options, errors in one line, near misses, Ctrl-C, checks before a model loads."""

import gzip
import lzma
import os
import sys
from dataclasses import MISSING, dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import transformers
from launching import options

from favor.eval.papers.datasets import read_rows
from favor.models.speech import Pronunciations
from favor.train import clm, distill, glue, mlm
from favor.train.common import loop
from favor.train.common.arguments import Checked, option
from favor.train.common.program import DataclassParser, program
from favor.train.text.samples import is_text, open_lines, read_text

PROGRAMS = {"favor-mlm": mlm, "favor-clm": clm, "favor.train.distill": distill}


@dataclass(kw_only=True)
class Base(Checked):
    """Of the base. And more."""

    name: str = option(MISSING, "A name.", choices=("x", "other"))
    number: int | None = option(None, "A number.", above=0, most=5)


@dataclass(kw_only=True)
class Further(Base):
    """Of the further one."""

    rate: float = option(0.5, "50 % of it.")
    resume: bool = option(False, "Go on.")
    seeds: list[int] = option([1, 2], "Seeds.", least=0, below=9)
    words: list[str] | None = option(None, "Words.")


def read(*words):
    return DataclassParser("prog", "Text.", [Further]).parse(words)[0]


def test_values_have_the_types_of_their_fields():
    assert read("--name", "x") == Further(name="x", number=None, rate=0.5, resume=False, seeds=[1, 2], words=None)
    given = ("--name", "x", "--number", "3", "--rate", "2", "--resume", "--seeds", "4", "5", "--words", "a", "b")
    assert read(*given) == Further(name="x", number=3, rate=2.0, resume=True, seeds=[4, 5], words=["a", "b"])
    assert isinstance(read(*given).rate, float)


def test_wrong_values_are_one_line(capsys):
    for word, said in ("--resume=maybe", "expected true or false, got 'maybe'"), ("--number=1.5", "invalid int value"):
        with pytest.raises(SystemExit, match="2"):
            read("--name", "x", word)
        assert said in capsys.readouterr().err


def test_values_that_are_not_allowed_are_errors():
    for words, said in {
        "--number 0": "number must be greater than 0 and at most 5, got 0",
        "--number 6": "number must be greater than 0 and at most 5, got 6",
        "--seeds 0 9": r"seeds must be at least 0 and less than 9, got \[0, 9\]",
        "--seeds 8 -1": "seeds must be at least 0",
        "--name othre": "name must be one of x, other, got 'othre': did you mean other",
    }.items():
        with pytest.raises(ValueError, match=said):
            read("--name", "x", *words.split())
    assert read("--name", "x", "--number", "5", "--seeds", "0").seeds == [0]
    read("--name", "x").seeds.append(3)
    assert read("--name", "x").seeds == [1, 2]  # lists are not shared


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Manifests and GLUE's tables are tested with their readers."""
    for name, content, read, expected in (
        *((name, "GO HER", read_text, "GO HER") for name in ("a.txt", "a.txt.gz", "a.txt.xz")),
        ("lexicon.txt", "GO\tG OU\r\n", lambda path: list(Pronunciations(path).spoken), ["GO"]),
        ("table.csv", "1,2\r\n3,4\r\n", read_rows, [["1", "2"], ["3", "4"]]),
    ):
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
        (tmp_path / name).write_bytes(pack(content.encode("utf-8-sig")))
        assert read(tmp_path / name) == expected


def test_bad_bytes_spoil_their_own_line(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\xff\ntw\xc3\xb6\n\0")
    with open_lines(tmp_path / "a") as lines:
        read = [line.strip() for line in lines]
    assert (read[0], read[2], [is_text(line) for line in read]) == ("one", "tw\u00f6", [True, False, True, False])


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
    for kind in (transformers.AutoModelForMaskedLM, transformers.AutoModelForSequenceClassification):
        monkeypatch.setattr(kind, "from_pretrained", None)
    monkeypatch.setattr(distill, "load_exact", None)


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


def test_glue_names_what_is_wrong(start, bert_folder, glue_folder, wrong_files, no_model, monkeypatch):
    monkeypatch.chdir(wrong_files)
    settings = {"model_name_or_path": bert_folder, "task_name": "sst2", "data_dir": glue_folder, "output_dir": "run"}
    for changes, parts in (
        ({"task_name": "rtte"}, ["unknown GLUE task 'rtte': did you mean rte? task_name must be one of cola"]),
        ({"attn_implementation": "favour#"}, ["got 'favour#': did you mean favor#?"]),
        ({"attn_implementation": "FAVOR+"}, ["did you mean favor+?"]),
        ({"model_name_or_path": "./nowhere"}, ["'./nowhere': there is no such folder here"]),
        ({"model_name_or_path": "out/nowhere"}, ["'out/nowhere': there is no such folder here, and the hub gives"]),
        ({"model_name_or_path": "folder"}, ["which holds no config.json"]),
        ({"data_dir": "nowhere"}, ["data_dir must be an existing folder, got nowhere"]),
        ({"learning_rate": "fast"}, ["argument --learning_rate: invalid float value: 'fast'"]),
        ({"task_name": None}, ["the following arguments are required: --task_name"]),
        ({"num_feature": 3}, ["unknown option --num_feature: did you mean --num_features?"]),
        ({"something": 3}, ["unknown option --something: --help lists all"]),
    ):
        code, said = start(glue, *options(settings | changes))
        assert_one_line(said, code, "favor-glue", *parts)
        assert not (wrong_files / "run").exists()


def test_texts_are_checked_before_the_model(start, bert_folder, wrong_files, no_model, monkeypatch):
    monkeypatch.chdir(wrong_files)
    files = {
        "nothing.txt": "expected a text file, got nothing.txt, which is not there",
        "folder": "which is a folder",
        "empty.txt": "empty.txt holds no text",
        "bytes.txt": "bytes.txt cannot be read as UTF-8 text",
        "cut.txt.gz": "cut.txt.gz cannot be read as UTF-8 text",
    }
    for (name, module), (file, part) in product(PROGRAMS.items(), files.items()):
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
    return SimpleNamespace(cli=program("name", main))


def test_errors_become_lines_but_a_defect_keeps_its_traceback_and_exit_codes_are_those_of_the_program(start):
    for error, said in (
        (ValueError("one\n  two"), "name: error: one two (--debug shows where)\n"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), "name: error: x.txt: No such file or directory ("),
        (OSError(), "name: error: OSError ("),
        (KeyboardInterrupt(), "\nname: stopped\n"),
    ):
        code, found = start(run_of(Mock(side_effect=error)))
        assert found.startswith(said)
        assert code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    with pytest.raises(ZeroDivisionError):
        run_of(lambda: 1 / 0).cli()
    assert start(run_of(lambda: 3))[0] == 3
    assert start(run_of(lambda: {"metrics": 1}))[0] == 0
    # Under a launcher the lines that follow are not ours.
    said = start(run_of(lambda: int("x")), environment={"ACCELERATE_MIXED_PRECISION": "no"})[1]
    assert said.endswith("; the lines below are from accelerate launch\n")
