"""README fits a screen and its examples run; links in all pages lead somewhere."""

import re
from pathlib import Path

import pytest
from pages import FENCED, run_page

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [page for folder in ("eval/results", "favor", "models") for page in sorted((ROOT / folder).rglob("*.md"))]


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


def test_readme_fits():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200
    assert len(re.findall(r"!\[", text)) == 1


def test_readme_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_page(README) > 0
