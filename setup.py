"""Maps the four folders of the repository to one package; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

PARTS = {"favor": "favor", "favor.models": "models", "favor.train": "train", "favor.eval": "eval"}

packages = [*PARTS]
for part, folder in PARTS.items():
    packages += [f"{part}.{inner}" for inner in find_packages(folder)]

setup(packages=packages, package_dir=PARTS)
