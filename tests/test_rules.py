"""The rules of docs/development/architecture.md that can be counted, and what the docstring of a public name has."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

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
                doc = ast.get_docstring(node) or ""
                assert not re.match(r"(What|The\s+same)(\s|$)", doc), f"{path.relative_to(ROOT)}: {node.name}"


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


PARTS = ("features", "landmark", "kernels", "optim", "decomposition", "sklearn")
ZOO = ("bert", "conformer", "whisper_ctc", "speech")
MODULES = ("favor", *(f"favor.{name}" for name in PARTS), *(f"favor.models.{name}" for name in ZOO))
# Their parameters are those of a class of another package, which their docstrings name.
ELSEWHERE = ("PerformerBert", "Conformer", "Whisper")


def public():
    """Name and object of every public function and class."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in module.__all__:
            thing = getattr(module, attribute)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found.setdefault(f"{thing.__module__}.{thing.__qualname__}", thing)
    return found


def own_doc(thing):
    return inspect.cleandoc(thing.__dict__.get("__doc__") or "" if inspect.isclass(thing) else thing.__doc__ or "")


def section(doc, *titles):
    """The indented lines below one of the titles."""
    for title in titles:
        found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", doc + "\n", re.MULTILINE)
        if found:
            return found[1]
    return ""


def parameters(thing):
    """The parameters that a user gives, without those of a class of another package."""
    if inspect.isclass(thing) and thing.__name__.startswith(ELSEWHERE):
        return []
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return []
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in signature.parameters.values() if one.kind not in starred]


def checks(thing):
    """Source of a function, or of what makes an instance of a class."""
    if inspect.isclass(thing):
        thing = vars(thing).get("__post_init__") or vars(thing).get("__init__") or (lambda: None)
    try:
        return inspect.getsource(thing)
    except OSError:  # made by a dataclass
        return ""


def lacking(thing):
    """What the docstring of a public thing does not have."""
    doc, lacks = own_doc(thing), []
    described = section(doc, "Args") + section(doc, "Attributes")
    unnamed = [name for name in parameters(thing) if not re.search(rf"\b{name}\b.*?:", described)]
    if unnamed:
        lacks.append("Args: " + ", ".join(unnamed))
    returns = getattr(thing, "__annotations__", {}).get("return")
    if inspect.isfunction(thing) and returns not in (None, "None") and not section(doc, "Returns"):
        lacks.append("Returns")
    if re.search(r"^\s+raise \w+", checks(thing), re.MULTILINE) and not section(doc, "Raises"):
        lacks.append("Raises")
    only_names_a_config = "config_class" in vars(thing) and not {"__init__", "forward"} & vars(thing).keys()
    only_holds_data = dataclasses.is_dataclass(thing) and section(doc, "Attributes")
    if ">>>" not in section(doc, "Examples?") and not only_names_a_config and not only_holds_data:
        lacks.append("Example")
    return lacks


@pytest.mark.parametrize("name", public())
def test_docstring_is_complete(name):
    assert lacking(public()[name]) == []
