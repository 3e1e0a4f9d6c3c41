"""Every program that is started by hand: it is importable under its name, and `--help` explains its options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def programs() -> list[str]:
    """What `python -m` starts: modules and packages of `train` and `eval` that act when they are the main module."""
    found = []
    for part in ("train", "eval"):
        for path in sorted([*(ROOT / part).glob("*.py"), *(ROOT / part).glob("*/__main__.py")]):
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


@pytest.mark.parametrize("program", programs())
def test_every_program_explains_itself(program, answers):
    code, printed = answers[program]
    assert code == 0
    assert "--output_dir" in printed or "--results" in printed


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_console_script_starts(script, answers):
    code, printed = answers[SCRIPTS[script]]
    assert code == 0
    assert "usage" in printed


def test_programs_with_scripts_are_among_them():
    named = {target.partition(":")[0].removesuffix(".__main__") for target in SCRIPTS.values()}
    assert named <= set(programs())
