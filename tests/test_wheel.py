"""The files of a release: sdist and wheel are built, and the wheel alone runs the README's first example."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import venv
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_readme import FENCED, README

ROOT = Path(__file__).parent.parent
SOURCES = ("favor", "models", "train", "eval", "scripts/command")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
SEEN = """
import importlib.metadata, importlib.util
import favor, favor.models
print(favor.__file__)
print(importlib.metadata.version("favor"), importlib.util.find_spec("sklearn"))
"""


def run(*words: object, **options: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def closure(requirements: list[str]) -> set[str]:
    """The installed distributions that requirements bring, with all that these require in turn; no extras."""
    found: set[str] = set()
    waiting = [*requirements]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += importlib.metadata.requires(name) or []
    return found


def show(distributions: set[str], folder: Path) -> None:
    """Links the files of installed distributions into the `site-packages` of another environment."""
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with both files, made from a copy of the sources: building writes beside them."""
    pytest.importorskip("build")
    home = tmp_path_factory.mktemp("release")
    for part in SOURCES:
        shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in FILES:
        shutil.copy(ROOT / file, home / file)
    # The wheel is made from the sdist, so that the sdist is complete.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", home / "dist", home)
    return home / "dist"


@pytest.mark.slow
def test_the_wheel_alone_runs_the_first_example(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    needed = [line for line in importlib.metadata.requires("favor") if "extra ==" not in line]
    show(closure(needed), site)
    blocks = FENCED.findall(README.read_text())
    code, shown = next(
        (block[1], following[1])
        for block, following in pairwise(blocks)
        if (block[0], following[0]) == ("python", "text")
    )
    printed = run(python, "-W", "ignore", "-c", code + SEEN, cwd=tmp_path)
    *output, place, seen = printed.splitlines()
    assert [line.rstrip() for line in output] == shown.splitlines()
    assert Path(place).is_relative_to(site)
    assert seen == f"{wheel.name.split('-')[1]} None"  # nothing of an extra


@pytest.mark.slow
def test_the_sdist_has_sources_and_papers_and_no_results(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES} <= names
    own = {str(path.relative_to(ROOT)) for part in SOURCES for path in (ROOT / part).rglob("*.py")}
    assert own <= names
    assert not [name for name in names if "results" in name or name.startswith("tests")]
