"""Every program that is started by hand: it starts under its name, and its options keep the rules that all share.

One name is for one thing and has one type, every option has its help, old and near names are errors of one line.
"""

import io
import json
import re
import runpy
import subprocess
import sys
import warnings
from collections import defaultdict
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import favor
from favor.eval.common import launch
from favor.train.common import checkpoint
from favor.train.common.program import did_you_mean
from favor_command import command, convert
from favor_command.program import RENAMED, Parser, renamed
from favor_command.programs import ROOT as COMMANDS
from favor_command.programs import Folder

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it under its old name
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# Words by which people call what transformers and accelerate call otherwise.
OTHER_WORDS = """attention backend workers num_workers accumulate accumulation_steps lr scheduler schedule eval_samples
    max_samples clip grad_clip train_samples max_steps train_steps steps model model_name model_dir checkpoint num_heads
    heads num_layers key_heads num_key_heads num_epochs out out_dir output results batch_size eval_batch_size
    train_batch_size random_seed eval_file valid_file warmup_fraction"""
# What the command `favor` says without a program.
AT_ONCE = """
import contextlib, io, json, sys
from favor_command import command

found = {}
for words in sys.argv[1:]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            command.run([*words.split(), "--help"])
        except SystemExit as ended:
            found[words] = [ended.code or 0, printed.getvalue()]
heavy = {"torch", "transformers", "numpy", "datasets", "accelerate", "favor"} & set(sys.modules)
print(json.dumps([found, sorted(heavy)]))
"""


def programs() -> list[str]:
    """What `python -m` starts: modules and packages of `train` and `eval` that act when they are the main module."""
    found = []
    for part in ("train", "eval"):
        for path in sorted((ROOT / part).rglob("*.py")):
            if '__name__ == "__main__"' in path.read_text():
                names = path.relative_to(ROOT / part).with_suffix("").parts
                found.append(".".join(["favor", part, *(name for name in names if name != "__main__")]))
    return found


@pytest.fixture(scope="module")
def answers():
    """Exit code and text of `--help`, by program and console script; the tests have imported most that they need."""
    found = {}
    for target in [*programs(), *sorted(set(SCRIPTS.values()))]:
        module, _, function = target.partition(":")
        printed = io.StringIO()
        main = {"run_name": "__main__", "alter_sys": True}
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), warnings.catch_warnings():
            patch.setattr(sys, "argv", [module, "--help"])
            warnings.filterwarnings("ignore", message=".*found in sys.modules")
            with pytest.raises(SystemExit) as ended:
                getattr(import_module(module), function)() if function else runpy.run_module(module, **main)
        found[target] = [ended.value.code, printed.getvalue()]
    return found


class ParsedError(Exception):
    """Raised in the place of parsing."""


@pytest.fixture(scope="module")
def parsers():
    """The parser of each program, by the words that start it."""
    found = {}

    def stop(self, *_):
        found["last"] = self
        raise ParsedError

    def walk(folder, words):
        for word, member in folder.members().items():
            if isinstance(member, Folder):
                walk(member, [*words, word])
                continue
            with pytest.raises(ParsedError):
                import_module(member.module).parse_arguments(["word"])
            found[" ".join([*words, word])] = found["last"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_known_args", stop)
        walk(COMMANDS, [])
    del found["last"]
    return found


@pytest.fixture(scope="module")
def options(parsers):
    """The options of all programs: for each name its argparse actions, by program."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for program, parser in parsers.items():
        for action in parser._actions:
            for name in action.option_strings:
                if name.startswith("--"):
                    found[name[2:]][program] = action
    return found


def test_the_command_lists_programs_at_once_and_hands_help_on(answers, capsys):
    done = subprocess.run([sys.executable, "-c", AT_ONCE, "", "train", "eval"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    for own, (code, printed) in found.items():
        assert code == 0
        assert printed.startswith(f"usage: favor {own} ".replace("  ", " "))
    with pytest.raises(SystemExit) as ended:
        command.run(["train", "clm", "--help"])
    printed = capsys.readouterr().out
    assert (ended.value.code or 0, printed.startswith("usage: favor train clm ")) == (0, True)
    # The name and so the line breaks of the usage are others.
    assert printed.partition("\n\n")[2] == answers["favor.train.clm"][1].partition("\n\n")[2]


def test_programs_and_console_scripts_start_and_explain_themselves(answers):
    for target, (code, printed) in answers.items():
        assert code == 0, f"{target}: {code}"
        assert printed.startswith("usage")
        assert ":" in target or "--debug" in printed
        assert target.partition(":")[0].removesuffix(".__main__") in {"favor_command.command", *programs()}


def test_every_option_is_explained_once_and_has_one_default(parsers):
    for program, parser in parsers.items():
        assert program == "check" or {"--output_dir", "--html", "--output_file"} & {*parser.options()}, program
        for action in parser._actions:
            text = parser._get_formatter()._get_help_string(action)
            assert len(text) > 2, f"{program}: {action.dest} has no help"
            assert "default: None" not in text
            assert text.lower().count("default: ") + text.count("Default ") < 2, f"{program}: {action.dest}: {text}"
            assert all(re.fullmatch("--?[a-z_0-9]+", name) for name in action.option_strings), action


def kind(action):
    """The type of one value: a word, a number, a switch."""
    if action.nargs == 0 or getattr(action.type, "__name__", "") == "_yes_or_no":
        return "switch"
    return str if action.type in (None, str, Path) else action.type


def test_one_name_has_one_type(options):
    kinds = {name: {kind(action) for action in actions.values()} for name, actions in options.items()}
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_one_thing_has_one_name(options):
    """As far as a machine sees: options with the same help have the same name, but for a plural."""
    names = defaultdict(set)
    for name, actions in options.items():
        for action in actions.values():
            text = re.sub(r"[;.]? *default.*", "", (action.help or "").lower()).rstrip(".")
            names[text].add(name.removesuffix("s"))
    double = {text: found for text, found in names.items() if len(found) > 1 and len(text.split()) > 1}
    assert double == {}
    assert {*OTHER_WORDS.split()} & set(options) == set()


def test_every_value_has_a_name_that_is_not_abbreviated(parsers):
    for program, parser in parsers.items():
        assert not parser.allow_abbrev, program
        assert all(action.option_strings for action in parser._actions), program


def test_an_old_name_is_one_line_with_the_new_one(parsers, options, capsys):
    """Also where the new option is required, and with hyphens."""
    for old, names in RENAMED.items():
        programs = {program for new in names for program in options[new]} - set(options.get(old, ()))
        assert programs, f"{old} is old in no program"
        assert all(programs & set(options[new]) for new in names), f"one of {names} is not needed"
        for program in programs:
            new = renamed(old, [name[2:] for name in parsers[program].options()])
            for word in (f"--{old}", f"--{old.replace('_', '-')}=3"):
                with pytest.raises(SystemExit):
                    parsers[program].parse_args([word, "3"])
                said = capsys.readouterr().err.partition("error: ")[2]
                assert said == f"{word.split('=')[0]} is now --{new}\n"


def test_near_names_are_suggested_in_every_program(parsers, capsys):
    for program, parser in parsers.items():
        for name in parser.options():
            if len(name) > 7:
                wrong = f"{name[:5]}{name[6]}{name[5]}{name[7:]}" if name[5] != name[6] else name[:-1]
                with pytest.raises(SystemExit):
                    parser.refuse([wrong])
                said = capsys.readouterr().err
                assert re.search(rf"unknown option {wrong}: did you mean --\w+\?\n$", said), program


@pytest.mark.parametrize(
    "words",
    ["m o --window 3", "m --window 3 o", "--window 3 m o", "--output-dir o m --window 3", "--model-name-or-path=m o"],
)
def test_names_of_model_and_folder_may_be_left_out(words):
    found = convert.parse_arguments(words.split())
    assert (found.model, found.out, found.window) == ("m", Path("o"), 3 if "3" in words else None)


def test_a_missing_or_further_word_is_one_line(capsys):
    for words, said in (("m", "--output_dir"), ("m o x", "did not expect 'x'"), ("m o --windw 3", "--window?")):
        with pytest.raises(SystemExit):
            convert.parse_arguments(words.split())
        assert said in capsys.readouterr().err


def test_a_training_finished_with_old_names_is_not_run_again(tmp_path):
    words = ["--train_file", "x", "--validation_file", "eval_file"]
    (tmp_path / checkpoint.RESULTS).write_text('{"loss": 3}')
    cell = {"arguments": ["--train_file", "x", "--eval_file", "eval_file"], "machine": "m"}
    (tmp_path / "cell.json").write_text(json.dumps(cell))
    backend = launch.Backend("sdpa")
    assert launch.train_once(words, backend, tmp_path) == ({"loss": 3}, "m", False)
    with pytest.raises(ValueError, match="other arguments"):
        launch.train_once([*words[:-1], "other"], backend, tmp_path)


def test_near_words():
    for word, known, near in (
        ("--num_feature", ["--features", "--num_features"], "--num_features"),
        ("--batch-size", ["--seed", "--per_device_eval_batch_size"], "--per_device_eval_batch_size"),
        ("--resume_from_checkpoint", ["--resume", "--report_to"], "--resume"),
        ("FAVOR+", favor.BACKENDS, "favor+"),
        ("bertmodel", ["BertModel", "T5Model"], "BertModel"),
        ("--entirely_else", ["--num_features"], None),
        ("x", ["a_x_b"], None),
    ):
        assert did_you_mean(word, known) == (f": did you mean {near}?" if near else "")
