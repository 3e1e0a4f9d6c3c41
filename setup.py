"""Maps the folders of the repository to two packages; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

PARTS = {"favor": "favor", "favor.models": "models", "favor.train": "train", "favor.eval": "eval"}
PARTS |= {"favor_command": "scripts/command"}

packages = [*PARTS]
for part, folder in PARTS.items():
    packages += [f"{part}.{inner}" for inner in find_packages(folder)]

setup(packages=packages, package_dir=PARTS)
