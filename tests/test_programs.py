"""Every program that is started by hand: it is importable under its name, and `--help` explains its options."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from favor_command.programs import ROOT as COMMANDS
from favor_command.programs import Folder

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it under its old name
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# All in one process: most of the time of a program that only explains itself goes into imports.
HELP = """
import contextlib, importlib, io, json, runpy, sys, traceback, warnings

warnings.filterwarnings("ignore", message=".*found in sys.modules")
found = {}
for target in sys.argv[1:]:
    module, _, function = target.partition(":")
    sys.argv = [module, "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            if function:
                getattr(importlib.import_module(module), function)()
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = "went on after --help"
        except SystemExit as ended:
            code = ended.code
        except Exception:
            code = traceback.format_exc()
    found[target] = [code, printed.getvalue()]
print(json.dumps(found))
"""
# What the command `favor` says without a program, and for one.
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
    if len(found) == 3:
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
    """Exit code and text of `--help`, by program and console script."""
    command = [sys.executable, "-c", HELP, *programs(), *sorted(set(SCRIPTS.values()))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def commands(folder: Folder = COMMANDS, words: tuple[str, ...] = ()) -> dict[str, str]:
    """The module of each program, by the words of the command `favor` that start it."""
    found = {}
    for word, member in folder.members().items():
        inner = (*words, word)
        found |= commands(member, inner) if isinstance(member, Folder) else {" ".join(inner): member.module}
    return {words: module.removesuffix(".__main__") for words, module in found.items()}


def test_the_command_lists_programs_at_once_and_hands_help_on(answers):
    words = ["", "train", "eval", "train clm"]
    done = subprocess.run([sys.executable, "-c", AT_ONCE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found, heavy = json.loads(done.stdout)
    assert heavy == []
    for own, (code, printed) in found.items():
        assert code == 0
        assert printed.startswith(f"usage: favor {own} ".replace("  ", " "))
    # The name and so the line breaks of the usage are others.
    assert found["train clm"][1].partition("\n\n")[2] == answers["favor.train.clm"][1].partition("\n\n")[2]


def options(printed: str) -> dict[str, str]:
    """The help of each option, by how it is written."""
    found, name = {}, None
    for line in printed.partition("\noptions:\n")[2].splitlines():
        if line.startswith("  -") or (line and not line.startswith(" ")):
            name, _, text = line.strip().partition("  ")
            assert name not in found, f"{name} is listed twice"
            found[name] = text
        elif name is not None:
            found[name] += line
    return {name: " ".join(text.split()) for name, text in found.items() if name.startswith("-")}


@pytest.mark.parametrize("program", programs())
def test_every_option_is_explained_once_and_has_one_default(program, answers):
    code, printed = answers[program]
    assert code == 0
    assert any(name in printed for name in ("--output_dir", "--html", "--output_file"))
    found = options(printed)
    assert len(found) > 2
    assert "--debug" in found
    for name, text in found.items():
        assert len(text) > 2, f"{name} has no help"
        assert "default: None" not in text
        assert text.lower().count("default: ") + text.count("Default ") < 2, f"{name}: {text}"
        assert re.fullmatch(r"--?[a-z_0-9]+(, --help)?( .*)?", name), name


def test_console_scripts_start_programs(answers):
    for target in SCRIPTS.values():
        code, printed = answers[target]
        assert code == 0
        assert "usage" in printed
        assert target.partition(":")[0].removesuffix(".__main__") in {"favor_command.command", *programs()}
