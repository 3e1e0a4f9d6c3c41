"""Settings of Sphinx. `scripts/docs` builds the site with them.

The source folder of the site is the repository, so that a link between two Markdown files leads to the same place on
GitHub and on the site. The sidebar is made from the lists of docs/index.md.
"""

import logging
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))  # the modules of this folder: `tables`
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import transformers  # noqa: E402  after the settings that it reads
from sphinx_gallery import utils as gallery  # noqa: E402
from tables import made  # noqa: E402

import favor  # noqa: E402

# Programs of the gallery print what they are about, and nothing else.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("favor").setLevel(logging.WARNING)

# The gallery warns of spaces in the whole path of an example. Its links hold the names alone, which have none.
gallery.check_spaces_in_filenames = lambda files: None

project = "favor"
release = favor.__version__
html_title = f"favor {release}"
project_copyright = "the authors of favor"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "docs/**.rst",
    "eval/results/**.md",
    "favor/*/README.md",
    "models/*/README.md",
]
exclude_patterns = [".*", "build", "out", "tests", "**/__pycache__", "*.egg-info"]
suppress_warnings = ["config.cache"]  # the settings of the gallery hold functions
html_theme = "furo"
html_extra_path = ["_site"]
html_copy_source = False

# Markdown, as GitHub reads it
myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]

# Docstrings: single backticks are code, sections are those of Google's style.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "docs/gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "show_memory": False,
    "show_signature": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "plot_gallery": True,
    "min_reported_time": 60,
    "write_computation_times": False,
}


# Pages that only the site has, by the heading of docs/index.md below which they stand
MADE_HERE = {"Begin": ["docs/gallery/index", "docs/reference/index"]}


def sidebar(index: str, folder: str) -> str:
    """The pages that the lists of docs/index.md link to, by heading, as hidden tables of contents."""
    found = []
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        caption, _, text = part.partition("\n")
        links = re.findall(r"\]\(([^)#:\s]+)\.(?:md|rst)\)", text)
        pages = [os.path.normpath(os.path.join(folder, link)) for link in links]
        pages += MADE_HERE.get(caption.strip(), [])
        if pages:
            lines = "\n".join("/" + page for page in pages)
            found.append(f"```{{toctree}}\n:hidden:\n:caption: {caption.strip()}\n\n{lines}\n```\n")
    return "\n" + "\n".join(found)


def add_contents(app, name: str, content: list[str]) -> None:
    """Completes a page when Sphinx reads it: tables, the sidebar of the first page, pages below the list of results."""
    content[0] = made(content[0])
    if name == root_doc:
        content[0] += sidebar(content[0], "docs")
    if name == "eval/results/README":
        topics = sorted(path.parent.name for path in (ROOT / "eval/results").glob("*/README.md"))
        lines = "\n".join(f"{topic} <{topic}/README>" for topic in topics)
        content[0] += f"\n```{{toctree}}\n:hidden:\n\n{lines}\n```\n"


def escape(line: str) -> str:
    """Keeps |x|, x* and x_ of mathematics from being markup; what stands in backticks is code already."""
    parts = re.split(r"(`+[^`]*`+)", line)
    return "".join(part if part.startswith("`") else re.sub(r"[|*]|_(?!\w)", r"\\\g<0>", part) for part in parts)


def read_docstring(app, what, name, thing, options, lines: list[str]) -> None:
    """Prepares a docstring in plain text: an indented block is a formula or code, and mathematics is no markup."""
    block = None  # indentation of the line before a block
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            block = None
        if block is not None or line.lstrip().startswith((">>>", "..")) or re.match(r"\s*\*+\w+:", line):
            continue
        lines[number] = escape(line)
        following = lines[number + 1 : number + 3]
        begins = len(following) == 2 and not following[0] and len(following[1]) - len(following[1].lstrip()) > indent
        if line.rstrip().endswith((":", ",", ".")) and begins and ">>>" not in following[1]:
            lines[number] += ":" if line.endswith(":") else " ::"
            block = indent


def skip(app, what, name, thing, is_skipped, options):
    """Leaves out what scikit-learn adds to every estimator."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def setup(app) -> None:
    """Sphinx calls this with its application."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_docstring, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip)
