"""The package as a whole: which part may import which, what is shipped, and that documented examples run."""

import ast
import doctest
import importlib
import pkgutil
import runpy
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import setuptools
import yaml
from own_family import registered

import favor
import favor.eval
import favor.models
import favor.train
import favor_command

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it under its old name
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
# Each part may import itself and what is named here.
MAY_IMPORT = {
    "favor": set(),
    "favor_command": {"favor", "models"},
    "models": {"favor"},
    "train": {"favor", "favor_command", "models"},
    "eval": {"favor", "favor_command", "models", "train"},
}
FOLDERS = {part: ROOT / part for part in MAY_IMPORT} | {"favor_command": ROOT / "scripts" / "command"}


def part_of(module: str) -> str | None:
    """The part a module name belongs to, None for other packages."""
    names = module.split(".")
    if names[0] != "favor":
        return names[0] if names[0] == "favor_command" else None
    return names[1] if len(names) > 1 and names[1] in MAY_IMPORT else "favor"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_have_no_circle():
    """Those that run when a module is imported; inside of a function an import may look upwards."""
    files = {}
    for part, folder in FOLDERS.items():
        home = part if part.startswith("favor") else f"favor.{part}"
        for path in folder.rglob("*.py"):
            files[".".join([home, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__")] = path
    graph = {}
    for name, path in files.items():
        at_once = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        found = {f"{node.module}.{alias.name}" for node in at_once for alias in node.names}
        graph[name] = {one if one in files else one.rpartition(".")[0] for one in found} & files.keys()
    assert sum(map(len, graph.values())) > len(files)
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part):
    files = list(FOLDERS[part].rglob("*.py"))
    assert files
    for path in files:
        found = imports(path)
        parts = {part_of(name) for name in found} - {None, part}
        assert parts <= MAY_IMPORT[part], f"{path} imports {parts}"
        beside = {name.split(".")[2] for name in found if name.startswith(f"favor.{part}.")}
        folder = path.relative_to(FOLDERS[part]).parts[0]
        if folder == "common":
            assert beside <= {"common"}, path
        if part == "models" and folder != "__init__.py":  # no model imports from another
            assert beside <= {folder, "speech", "stored_backend"}, path
        if part == "favor" and folder != "integrations":
            assert "transformers" not in {name.split(".")[0] for name in found}, path


def test_every_folder_with_code_is_shipped_and_results_are_not(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **values: given.update(values))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    shipped = set()
    for package in given["packages"]:
        part = max((name for name in given["package_dir"] if f"{package}.".startswith(f"{name}.")), key=len)
        folder = ROOT / given["package_dir"][part] / Path(*package.removeprefix(part).strip(".").split("."))
        assert (folder / "__init__.py").is_file(), package
        shipped |= set(folder.glob("*.py"))
    assert shipped == {path for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    assert not any("results" in package for package in given["packages"])
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = {"favor": ["py.typed"], "favor.eval.demo": ["text/*"], "favor.eval": ["report.html"]}
    assert data == {"include-package-data": False, "package-data": files}
    assert (ROOT / "eval/report.html").is_file()
    assert {path.name for path in (ROOT / "eval/demo/text").iterdir()} == {"novels.txt.xz", "ORIGIN.md"}


def test_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert favor.__version__ == project["version"]
    assert f"## {favor.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == favor.__version__
    assert citation["license"] == project["license"]


def test_examples_in_docstrings_run():
    tried = 0
    for package in (favor, favor_command, favor.models, favor.train, favor.eval):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if info.name.endswith("__main__"):
                continue
            module = importlib.import_module(info.name)
            with registered():  # an example registers a family
                result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
            assert result.failed == 0, info.name
            tried += result.attempted
    assert tried > 0
