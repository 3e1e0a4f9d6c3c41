"""The rules of docs/development/architecture.md that can be counted."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES, MOST_PARAMETERS = 60, 10
FILES = [*(ROOT / "favor").rglob("*.py"), *(ROOT / "scripts" / "command").rglob("*.py")]


def functions(path):
    """Name, number of parameters and lines of code without docstring of every function, but for Triton kernels."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(d) for d in node.decorator_list):
            continue
        own = node.args
        names = [arg.arg for arg in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg) if arg]
        first, lines = node.body[0], node.end_lineno - node.lineno + 1
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines -= first.end_lineno - first.lineno + 1
        yield node.name, len([name for name in names if name not in ("self", "cls", "ctx")]), lines


def is_exempt(path, name):
    """scikit-learn wants every parameter of an estimator by its name in the constructor."""
    return name == "__init__" and path.parent.name == "decomposition"


def test_functions_are_short_and_take_few_parameters():
    found, counted = [], 0
    for path in FILES:
        for name, parameters, lines in functions(path):
            counted += 1
            many = parameters > MOST_PARAMETERS and not is_exempt(path, name)
            if lines > MOST_LINES or many:
                found.append(f"{path.relative_to(ROOT)}: {name} has {lines} lines of code and {parameters} parameters")
    assert counted > 500
    assert not found


def test_docstrings_stand_alone():
    """One that begins with "What" or "The same" says nothing in `help()`."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = (ast.get_docstring(node) or "").split(maxsplit=2)[:2]
                assert first[:1] != ["What"], f"{path.relative_to(ROOT)}: {node.name}"
                assert first != ["The", "same"], f"{path.relative_to(ROOT)}: {node.name}"


NAMES = {"trig", "pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "relu", "elu", "landmark"}


def test_no_code_asks_for_the_name_of_a_family():
    """What a family is able to do is said by its class."""
    for part in ("favor", "models", "train"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Compare):
                    continue
                sides = {ast.unparse(side).strip("'\"") for side in (node.left, *node.comparators)}
                assert not sides & NAMES, f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
