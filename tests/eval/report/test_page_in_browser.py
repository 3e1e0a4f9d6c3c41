"""The page of the report in headless Chromium, used with pointer and keys. Skipped where no Chromium is installed."""

import re
import shutil

import pytest

from favor.eval.report import render

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright and chromium, of pip and of the system"
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

LAYERS, HEADS = 3, 4
EVIL = "</script><img src=x onerror=alert(1)>"
COLOURS = "[...document.querySelectorAll('td.head')].map(cell => cell.style.backgroundColor).join()"


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


def lengths():
    common = {"samples": 1, "seconds": 0.15, "score": 1.0, "uniform": [[0.75] * HEADS] * LAYERS}
    return [
        {"length": length, "verdict": f"At {length:,} tokens do.", "fastest": best, **common}
        for length, best in ((512, None), (4096, 7))
    ]


@pytest.fixture(scope="module")
def browser():
    with (
        playwright.sync_playwright() as started,
        started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as opened,
    ):
        yield opened


@pytest.fixture
def page(browser, tmp_path):
    """The page, opened; it must give no error or warning, and ask for nothing from a network."""
    layers = [f"encoder.layer.{layer}" for layer in range(LAYERS)]
    data = {"model": EVIL, "facts": {"Text": EVIL}, "measure": "cosine of them", "layers": layers, "max_error": 0.25}
    (tmp_path / "page.html").write_text(render({**data, "lengths": lengths(), "settings": settings()}))
    opened, problems = browser.new_page(viewport={"width": 1000, "height": 900}), []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("request", lambda request: request.url.startswith("file:") or problems.append(request.url))
    opened.goto((tmp_path / "page.html").as_uri())
    yield opened
    opened.close()
    assert problems == []


def cells(page):
    return page.locator("td.head").all_text_contents()


def shown(number):
    return [f"{error:.2f}".removeprefix("0") for row in settings()[number]["errors"] for error in row]


def switch(page, name, value):
    page.locator(f"input[name='{name}'][value='{value}']").check(force=True)


def test_the_advice_is_what_is_shown_first(page):
    assert page.text_content(".verdict") == "At 4,096 tokens do."
    assert cells(page) == shown(7)
    assert page.text_content("#code") == "code 7"
    assert page.locator("img").count() == 0  # hostile names are text
    assert page.text_content("h1") == f"Linear attention on {EVIL}"
    summary = page.text_content("#summary")
    assert summary.startswith("landmark, M = 64, K = 0, window 128 at 4,096 tokens: mean error 0.122")
    assert "160 ms for a forward pass, 0.94 x as fast as exact attention" in summary


def test_a_cell_is_read_under_the_pointer(page):
    assert page.text_content("#read").startswith("Point at a cell")
    page.hover("#map tbody tr:nth-child(2) td:nth-child(4)")
    text = "Layer 1, head 2: error 0.127. The mean of all values instead of attention: 0.750."
    assert page.text_content("#read").startswith(text)
    assert page.text_content("#read").endswith("Module encoder.layer.1.")


def test_a_cell_is_read_with_the_keyboard(page):
    page.focus("input[name=window]:checked")
    page.keyboard.press("Tab")
    assert page.text_content("#read").startswith("Layer 0, head 0: error 0.007")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.text_content("#read").startswith("Layer 2, head 1: error 0.217")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    # The map is one stop of the Tab key, also after moving.
    assert page.locator("#map [tabindex='0']").count() == 1


def test_switches_change_the_map(page):
    before = page.evaluate(COLOURS)
    switch(page, "backend", "favor+")
    assert cells(page) == shown(11)
    assert page.evaluate(COLOURS) != before
    # Random features select no keys.
    assert page.locator("input[name=K]:disabled:not(:checked)").count() == page.locator("input[name=K]").count() > 0
    for name, value, number in (("length", 512, 5), ("window", 0, 4), ("backend", "landmark", None), ("K", 256, 2)):
        switch(page, name, value)
        assert number is None or cells(page) == shown(number)
    checked = page.evaluate("[...document.querySelectorAll('input:checked')].map(i => i.value)")
    assert checked == ["512", "landmark", "64", "256", "0"]


def test_error_against_time(page):
    """A point for each setting of the length, placed as its numbers are; a press on one, or on its row, shows it."""
    own, points = settings()[6:], page.locator("#plot .point")
    assert points.count() == len(own)
    assert points.first.locator("title").text_content() == "landmark, M = 64, K = 0: error 0.121, 150 ms"
    places = [point.get_attribute("transform") for point in points.all()]
    across, down = zip(*(map(float, re.findall(r"[\d.]+", place)) for place in places), strict=True)
    by_time = sorted(range(len(own)), key=lambda i: own[i]["seconds"])
    assert [across[i] for i in by_time] == sorted(across)
    by_error = sorted(range(len(own)), key=lambda i: -own[i]["error"])
    assert [down[i] for i in by_error] == sorted(down)
    assert float(page.get_attribute("#plot .exact", "x1")) == pytest.approx(across[0])  # of 150 ms too
    points.last.click()
    assert cells(page) == shown(11)
    page.evaluate("document.querySelector('details').open = true")
    page.click("#all tbody tr:nth-child(2) button")
    assert cells(page) == shown(7)
    assert page.locator("#all tbody tr").count() == len(own)


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_stands_out(page, dark):
    page.emulate_media(color_scheme="dark" if dark else "light")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.05) == dark
    for place in ("body", ".quiet", "caption", "legend", "dt"):
        assert contrast(page.evaluate(f"getComputedStyle(document.querySelector('{place}')).color"), ground) >= 4.5, (
            place
        )
    for place in ("input:checked + span", "code", ".verdict"):
        look = page.evaluate(
            f"(s => [s.color, s.backgroundColor])(getComputedStyle(document.querySelector('{place}')))"
        )
        assert contrast(*look) >= 4.5, place
    for error in range(0, 101, 5):
        look = page.evaluate(f"(c => [c.color, c.background])(colour({error / 100}))")
        black = {"#000": "rgb(0,0,0)", "#fff": "rgb(255,255,255)"}
        assert contrast(black[look[0]], look[1]) >= 4.5, error


def test_a_phone_shows_all_without_scrolling_sideways(page):
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.querySelector('svg').getBoundingClientRect().right") <= 360


def test_what_a_screen_reader_finds(page):
    title = "Error by layer and head, counted from 0: landmark, M = 64, K = 0, window 128, 4,096 tokens"
    grid = page.get_by_role("grid", name=title, exact=True)
    assert grid.get_by_role("gridcell").count() == LAYERS * (HEADS + 1)
    names = [("rowheader", f"layer {layer}") for layer in range(LAYERS)] + [("columnheader", "head 3")]
    assert [grid.get_by_role(role, name=name, exact=True).count() for role, name in names] == [1] * (LAYERS + 1)
    for name in ("512", "4,096", "landmark", "favor+"):
        assert page.get_by_role("radio", name=name, exact=True).count() == 1
    assert page.get_by_role("status").count() > 0
    assert page.get_by_role("img", name=re.compile("The table below has the numbers")).count() == 1
