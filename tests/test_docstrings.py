"""Every public function and class says what it takes, gives and raises, and has an example.

The examples run in `test_package.py`.
"""

import dataclasses
import importlib
import inspect
import re

import pytest

MODULES = (
    "favor",
    "favor.features",
    "favor.landmark",
    "favor.kernels",
    "favor.optim",
    "favor.decomposition",
    "favor.sklearn",
    "favor.models.bert",
    "favor.models.conformer",
    "favor.models.whisper_ctc",
    "favor.models.speech",
)
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
