"""The page of the report in headless Chromium, used with pointer and keys. Skipped where no Chromium is installed."""

import re

import pytest
from browser import CHROMIUM, chromium

from favor.eval.report import render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

LAYERS, HEADS = 3, 4
EVIL = "</script><img src=x onerror=alert(1)>"
READ, SUMMARY = "document.querySelector('#read').textContent", "document.querySelector('#summary').textContent"
CELLS = "[...document.querySelectorAll('td.head')].map(cell => cell.textContent)"


def made(backend, keys, window, length, number):
    """A setting whose errors are all different from those of others; none is a tie of rounding."""
    own = number / 1000 + 0.0004
    errors = [[round(own + layer / 10 + head / 100, 4) for head in range(HEADS)] for layer in range(LAYERS)]
    options = {"backend": backend, "M": 64, "K": keys, "window": window, "length": length, "code": f"code {number}"}
    numbers = {"error": sum(map(sum, errors)) / LAYERS / HEADS, "p90": 0.5, "score": 0.9, "seconds": (9 + number) / 100}
    return {**options, "errors": errors, **numbers}


def settings():
    kinds = [("landmark", 0), ("landmark", 256), ("favor+", None)]
    rows = [(*kind, window, length) for length in (512, 4096) for kind in kinds for window in (0, 128)]
    return [made(*row, number) for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    layers = [f"encoder.layer.{layer}" for layer in range(LAYERS)]
    data = {"model": EVIL, "facts": {"Text": EVIL}, "measure": "cosine of them", "layers": layers, "max_error": 0.25}
    common = {"samples": 1, "seconds": 0.15, "score": 1.0, "uniform": [[0.75] * HEADS] * LAYERS}
    data["lengths"] = [
        {"length": length, "verdict": f"At {length:,} tokens do.", "fastest": best, **common}
        for length, best in ((512, None), (4096, 7))
    ]
    (folder / "page.html").write_text(render({**data, "settings": settings()}))
    with chromium(folder / "profile") as opened:
        opened.file = folder / "page.html"
        yield opened


@pytest.fixture(autouse=True)
def fresh(page):
    page.look(1000, 900)
    page.open(page.file)
    yield
    assert page.problems == []


def shown(number):
    return [f"{error:.2f}".removeprefix("0") for row in settings()[number]["errors"] for error in row]


def test_the_advice_is_what_is_shown_first(page):
    assert page.run("document.querySelector('.verdict').textContent") == "At 4,096 tokens do."
    assert page.run(CELLS) == shown(7)
    assert page.run("document.querySelector('#code').textContent") == "code 7"
    assert page.run("document.querySelectorAll('img').length") == 0  # hostile names are text
    assert page.run("document.querySelector('h1').textContent") == f"Linear attention on {EVIL}"
    assert page.run(SUMMARY).startswith("landmark, M = 64, K = 0, window 128 at 4,096 tokens: mean error 0.122")
    assert "160 ms for a forward pass, 0.94 x as fast as exact attention" in page.run(SUMMARY)


def test_a_cell_is_read_under_the_pointer(page):
    assert page.run(READ).startswith("Point at a cell")
    page.point("#map tbody tr:nth-child(2) td:nth-child(4)")
    text = "Layer 1, head 2: error 0.127. The mean of all values instead of attention: 0.750."
    assert page.run(READ).startswith(text)
    assert page.run(READ).endswith("Module encoder.layer.1.")


def test_a_cell_is_read_with_the_keyboard(page):
    page.run("document.querySelector('input[name=window]:checked').focus()")
    page.key("Tab")
    assert page.run(READ).startswith("Layer 0, head 0: error 0.007")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.key(key)
    assert page.run(READ).startswith("Layer 2, head 1: error 0.217")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    # The map is one stop of the Tab key, also after moving.
    assert page.run("document.querySelectorAll(\"#map [tabindex='0']\").length") == 1


def test_switches_change_the_map(page):
    colours = "[...document.querySelectorAll('td.head')].map(cell => cell.style.backgroundColor).join()"
    before = page.run(colours)
    presses = [("backend", "favor+", 11), ("length", "512", 5), ("window", "0", 4)]
    for name, value, setting in (*presses, ("backend", "landmark", None), ("K", "256", 2)):
        page.point(f"input[name='{name}'][value='{value}']", press=True)
        # Random features select no keys.
        no_keys = page.run("[...document.querySelectorAll('input[name=K]')].every(i => i.disabled && !i.checked)")
        assert no_keys == (setting in (11, 5, 4))
        assert setting is None or page.run(CELLS) == shown(setting)
        assert page.run(colours) != before
    checked = page.run("[...document.querySelectorAll('input:checked')].map(i => i.value)")
    assert checked == ["512", "landmark", "64", "256", "0"]


def test_error_against_time(page):
    """A point for each setting of the length, placed as its numbers are; a press on one, or on its row, shows it."""
    own = settings()[6:]
    assert page.run("document.querySelectorAll('#plot .point').length") == len(own)
    titles = page.run("[...document.querySelectorAll('#plot .point title')].map(t => t.textContent)")
    assert titles[0] == "landmark, M = 64, K = 0: error 0.121, 150 ms"
    places = page.run("[...document.querySelectorAll('#plot .point')].map(p => p.getAttribute('transform'))")
    across, down = zip(*(map(float, re.findall(r"[\d.]+", place)) for place in places), strict=True)
    by_time = sorted(range(len(own)), key=lambda i: own[i]["seconds"])
    assert [across[i] for i in by_time] == sorted(across)
    by_error = sorted(range(len(own)), key=lambda i: -own[i]["error"])
    assert [down[i] for i in by_error] == sorted(down)
    exact = float(page.run("document.querySelector('#plot .exact').getAttribute('x1')"))
    assert exact == pytest.approx(across[0])  # of 150 ms too
    page.point("#plot .point:last-of-type", press=True)
    assert page.run(CELLS) == shown(11)
    page.run("document.querySelector('details').open = true")
    page.point("#all tbody tr:nth-child(2) button", press=True)
    assert page.run(CELLS) == shown(7)
    assert page.run("document.querySelectorAll('#all tbody tr').length") == len(own)


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_stands_out(page, dark):
    page.look(1000, 900, dark)
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.05) == dark
    for place in ("body", ".quiet", "caption", "legend", "dt"):
        assert contrast(page.run(f"getComputedStyle(document.querySelector('{place}')).color"), ground) >= 4.5, place
    for place in ("input:checked + span", "code", ".verdict"):
        look = page.run(f"(s => [s.color, s.backgroundColor])(getComputedStyle(document.querySelector('{place}')))")
        assert contrast(*look) >= 4.5, place
    for error in range(0, 101, 5):
        look = page.run(f"(c => [c.color, c.background])(colour({error / 100}))")
        black = {"#000": "rgb(0,0,0)", "#fff": "rgb(255,255,255)"}
        assert contrast(black[look[0]], look[1]) >= 4.5, error


def test_a_phone_shows_all_without_scrolling_sideways(page):
    page.look(360, 740)
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert page.run("document.querySelector('svg').getBoundingClientRect().right") <= 360


def test_what_a_screen_reader_finds(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    found = [(n["role"]["value"], n["name"]["value"]) for n in nodes if not n["ignored"] and n.get("name")]
    roles = [role for role, _ in found]
    title = "Error by layer and head, counted from 0: landmark, M = 64, K = 0, window 128, 4,096 tokens"
    assert ("grid", title) in found
    assert roles.count("gridcell") == LAYERS * (HEADS + 1)
    assert [name for role, name in found if role == "rowheader"] == [f"layer {layer}" for layer in range(LAYERS)]
    assert ("columnheader", "head 3") in found
    assert [name for role, name in found if role == "radio"][:4] == ["512", "4,096", "landmark", "favor+"]
    assert "status" in [n["role"]["value"] for n in nodes if not n["ignored"]]
    pictures = [name for role, name in found if role in ("image", "img")]
    assert len(pictures) == 1
    assert "The table below has the numbers" in pictures[0]
