"""README fits a screen; its examples and the recipes run as printed; links in all pages lead somewhere."""

import contextlib
import io
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch._inductor import config as inductor

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = [page for page in PAGES if page.parent.name == "recipes"]
ELSEWHERE = ["onnx"]  # in tests/integrations/test_export.py
OPTIONAL = ("accelerate", "peft", "sentence_transformers", "torchao")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = [page for folder in ("eval/results", "favor", "models") for page in sorted((ROOT / folder).rglob("*.md"))]


def run_page(page: Path, names: dict[str, object] | None = None) -> int:
    """Runs the blocks in order, in one namespace, and returns how many outputs were compared."""
    names = {} if names is None else names
    compared = 0
    blocks = FENCED.findall(page.read_text())
    for (language, code), (following, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        if following == "text":
            assert [line.rstrip() for line in printed.getvalue().splitlines()] == shown.splitlines(), code
            compared += 1
    return compared


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower().strip() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(page: Path) -> list[str]:
    """Local links of a page that lead to no file or no heading."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_and_anchors_resolve(page):
    assert dead_links(page) == []


def test_every_page_is_in_the_index():
    index = ROOT / "docs/index.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
    assert {page for page in PAGES if page != index} <= linked
    assert len(RECIPES) >= 7


def test_readme_fits():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200
    assert len(re.findall(r"!\[", text)) == 1


def test_readme_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_page(README) > 0


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("page", [page for page in RECIPES if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_recipe(page, tmp_path, monkeypatch):
    imported = set(re.findall(r"^(?:import|from) (\w+)", page.read_text(), re.MULTILINE))
    for package in (*OPTIONAL[:1], *imported & {*OPTIONAL}):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    verbosity = transformers.logging.get_verbosity()
    try:
        # Graphs are made as by default, but of operators of torch: a C++ compiler would take a minute.
        with inductor.patch(fallback_by_default=True):
            assert run_page(page) > 0
    finally:
        transformers.logging.set_verbosity(verbosity)
        logging.getLogger("sentence_transformers").setLevel(logging.NOTSET)
