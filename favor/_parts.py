"""Checks that the parts of the distribution make when they are imported: one checkout, and the packages of an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

# Packages that pip knows under another name than Python.
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "flashlight": "flashlight-text"}


def check_root(part: str, file: str) -> None:
    """Raises ImportError if a part, such as "favor.train", comes from another checkout than `favor` itself.

    In a checkout the folders `favor`, `models`, `train` and `eval` stand side by side; in an installed wheel the last
    three are inside `favor`. With two checkouts on one path Python takes each part from the first place where it finds
    it.
    """
    home, folder = Path(__file__).resolve().parent, Path(file).resolve().parent
    if folder.parent not in (home, home.parent):
        raise ImportError(
            f"favor is imported from {home} and {part} from {folder}: two checkouts are mixed. Remove one of them from "
            f"PYTHONPATH, or run `pip install -e .` in the one to use.",
            name=part,
        )


def needs(extra: str, *packages: str) -> None:
    """Raises ImportError for the first package that is not installed, with the extra that has it; imports nothing."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(
                f"{_DISTRIBUTIONS.get(package, package)} is not installed and is needed here; "
                f'`pip install "favor[{extra}]"` installs it.',
                name=package,
            )
