"""The rules of docs/development/architecture.md that can be counted."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES, MOST_PARAMETERS = 60, 10


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


@pytest.mark.parametrize("path", sorted((ROOT / "favor").rglob("*.py")), ids=lambda path: path.stem)
def test_functions_are_short_and_take_few_parameters(path):
    for name, parameters, lines in functions(path):
        assert lines <= MOST_LINES, f"{name} has {lines} lines of code"
        assert parameters <= MOST_PARAMETERS or is_exempt(path, name), f"{name} has {parameters} parameters"
