"""The recipes for other libraries run as they are printed, and give what they show."""

import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from pages import run_page
from torch._inductor.config import patch

PAGES = sorted((Path(__file__).parent.parent / "docs/recipes").glob("*.md"))
OPTIONAL = ("accelerate", "onnxruntime", "onnxscript", "peft", "sentence_transformers", "torchao")


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe(page, tmp_path, monkeypatch):
    imported = set(re.findall(r"^(?:import|from) (\w+)", page.read_text(), re.MULTILINE))
    for package in (*OPTIONAL[:1], *imported & {*OPTIONAL}):
        pytest.importorskip(package)
    if page.stem == "compile" and " " in f"{torch.__file__}{tmp_path}":
        pytest.skip("torch.compile calls a C++ compiler, and does not quote paths with spaces")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    verbosity = transformers.logging.get_verbosity()
    try:
        with patch(compile_threads=1):  # more would be processes that import torch first
            assert run_page(page) > 0
    finally:
        transformers.logging.set_verbosity(verbosity)
        logging.getLogger("sentence_transformers").setLevel(logging.NOTSET)


def test_there_are_recipes():
    assert len(PAGES) >= 7
