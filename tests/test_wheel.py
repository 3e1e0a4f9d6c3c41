"""Installations: the files of a release, the wheel alone, the core alone, errors that name the extra, one checkout."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_readme import FENCED, README

from favor.models.bert import PerformerBertConfig, PerformerBertForMaskedLM
from favor.models.conformer import ConformerConfig, ConformerForCTC

ROOT = Path(__file__).parent.parent
SOURCES = ("favor", "models", "train", "eval", "scripts/command")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
# Models of the zoo, loaded by Auto classes before they are imported.
ALONE = """
import json, sys
import favor, transformers
for auto in json.loads(sys.argv[1]):
    model = getattr(transformers, auto).from_pretrained(auto)
    print(type(model).__name__, model.config._attn_implementation)
"""
SEEN = """
import importlib.metadata, importlib.util
import favor, favor.models
print(favor.__file__)
print(importlib.metadata.version("favor"), [*map(importlib.util.find_spec, json.loads(sys.argv[2]))])
"""


def run(*words: object, **options: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def closure(requirements: list[str]) -> set[str]:
    """The installed distributions that requirements bring, with all that these require in turn; no extras."""
    found: set[str] = set()
    waiting = [*requirements]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += importlib.metadata.requires(name) or []
    return found


def show(distributions: set[str], folder: Path) -> None:
    """Links the files of installed distributions into the `site-packages` of another environment."""
    for name in distributions:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))


def python(*words: object) -> str:
    return run(sys.executable, *words)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with both files, made from a copy of the sources: building writes beside them."""
    pytest.importorskip("build")
    home = tmp_path_factory.mktemp("release")
    for part in SOURCES:
        shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in FILES:
        shutil.copy(ROOT / file, home / file)
    # The wheel is made from the sdist, so that the sdist is complete.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", home / "dist", home)
    return home / "dist"


def save_models(folder: Path) -> dict[str, str]:
    """Saves tiny models of the zoo in folders that are called as their Auto classes; gives their own classes."""
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    saved = {
        "AutoModelForMaskedLM": PerformerBertForMaskedLM(PerformerBertConfig(**tiny)),
        "AutoModelForCTC": ConformerForCTC(ConformerConfig(**tiny)),
    }
    for auto, model in saved.items():
        model.save_pretrained(folder / auto)
    return {auto: type(model).__name__ for auto, model in saved.items()}


@pytest.mark.slow
def test_the_wheel_alone_loads_models_and_runs_the_first_example(dist, tmp_path):
    """With nothing but what the core requires."""
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    words = ["install", "--quiet", "--no-deps", "--no-compile", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", python, *words, wheel)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    needed = [line for line in importlib.metadata.requires("favor") if "extra ==" not in line]
    show(closure(needed), site)
    blocks = FENCED.findall(README.read_text())
    following = (zip(*both, strict=True) for both in pairwise(blocks))
    code, shown = next(code for kinds, code in following if kinds == ("python", "text"))
    saved = save_models(tmp_path)
    given = map(json.dumps, ([*saved], EXTRA_PACKAGES))
    printed = run(python, "-W", "ignore", "-c", ALONE + code + SEEN, *given, cwd=tmp_path)
    *output, place, seen = printed.splitlines()
    assert output[: len(saved)] == [f"{name} favor#" for name in saved.values()]
    assert [line.rstrip() for line in output[len(saved) :]] == shown.splitlines()
    assert Path(place).is_relative_to(site)
    assert seen == f"{wheel.name.split('-')[1]} {len(EXTRA_PACKAGES) * [None]}"  # nothing of an extra


@pytest.mark.slow
def test_the_sdist_has_sources_and_papers_and_no_results(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*FILES} <= names
    own = {str(path.relative_to(ROOT)) for part in SOURCES for path in (ROOT / part).rglob("*.py")}
    assert own <= names
    assert not [name for name in names if "results" in name or name.startswith("tests")]


EXTRA_PACKAGES = ["sklearn", "matplotlib", "datasets", "accelerate", "sentencepiece", "soundfile", "jiwer"]
EXTRA_PACKAGES += ["scipy", "flashlight"]
WITHOUT = """
import importlib, json, sys
import torch, transformers, transformers.masking_utils, transformers.cache_utils
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

found, packages = {}, json.loads(sys.argv[1])
before = set(sys.modules)
import favor
found["imported"] = sorted({name.split(".")[0] for name in set(sys.modules) - before} & set(packages))
import favor.models
from favor.models.speech import train_tokenizer

def attempt(action):
    try:
        action()
    except ImportError as error:
        return str(error)

for missing, module in json.loads(sys.argv[2]):
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == missing}
    sys.modules[missing] = None
    name, _, attribute = module.partition(":")
    action = lambda: getattr(importlib.import_module(name), attribute or "__name__")
    found[f"{module} {missing}"] = attempt(action if module else lambda: train_tokenizer(["A B"]))
    del sys.modules[missing]
    sys.modules.update(kept)
print(json.dumps(found))

speech, programs = map(json.loads, sys.argv[3:])
for name in [name for name in sys.modules if name.startswith(("favor.train", "favor.eval", *speech))]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(speech))
for name in programs:
    importlib.import_module(name)
"""
# Programs that do without packages of speech.
SPEECH = ["jiwer", "soundfile", "flashlight"]
OTHERS = ["favor.train." + name for name in ("glue", "mlm", "clm", "distill")]
OTHERS += ["favor.eval." + name for name in ("glue.__main__", "language.perplexity", "approximation.__main__")]
# A package, what to import without it, and the extra that brings it. Without a module: training of word pieces.
NEEDED = [
    ("accelerate", "favor.train.glue", "train"),
    ("datasets", "favor.train.mlm", "train"),
    ("datasets", "favor.train.distill", "train"),
    ("jiwer", "favor.train.asr", "speech"),
    ("soundfile", "favor.train.nst", "speech"),
    ("matplotlib", "favor.eval.speed.__main__", "eval"),
    ("sklearn", "favor.eval.papers.variance", "eval"),
    ("soundfile", "favor.eval.asr", "speech"),
    ("jiwer", "favor.eval.long_form", "speech"),
    ("sklearn", "favor.sklearn", "sklearn"),
    ("scipy", "favor.decomposition:KLNMF", "sklearn"),
    ("sentencepiece", "", "speech"),
]


@pytest.fixture(scope="module")
def without():
    """What one fresh process found: packages that `import favor` brought along, and one error for each row above.

    It ends with an error if a program that is not for speech needs a package of speech.
    """
    given = EXTRA_PACKAGES, [row[:2] for row in NEEDED], SPEECH, OTHERS
    return json.loads(python("-c", WITHOUT, *map(json.dumps, given)))


def test_the_core_imports_no_package_of_an_extra(without):
    # transformers itself imports scipy and accelerate where they are installed, before `import favor`, and these two
    # with the tokenizers and feature extractors that the models of the zoo derive from.
    assert set(without["imported"]) <= {"sentencepiece", "soundfile"}


@pytest.mark.parametrize(("missing", "module", "extra"), NEEDED)
def test_a_missing_package_is_named_with_its_extra(without, missing, module, extra):
    package = "scikit-learn" if missing == "sklearn" else missing
    message = without[f"{module} {missing}"]
    assert f"{package} is not installed" in message
    assert f'pip install "favor[{extra}]"' in message


MIXED = """
import importlib, sys
home, parts, part = sys.argv[1:]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.path.insert(0, home)
import favor
favor.__path__ = [*favor.__path__, parts]
try:
    importlib.import_module(f"favor.{part}")
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("part", ["models", "train", "eval"])
def test_parts_of_two_checkouts_do_not_mix(part, tmp_path):
    """Layouts made of the files that check, without the rest: a checkout, a wheel, and two checkouts on one path."""
    one, other, wheel = (tmp_path / name for name in ("one", "other", "wheel"))
    for home, folder in ((one, one / part), (other, other / part), (wheel, wheel / "favor" / part)):
        (home / "favor").mkdir(parents=True)
        folder.mkdir()
        shutil.copy(ROOT / "favor/_parts.py", home / "favor")
        shutil.copy(ROOT / part / "__init__.py", folder)
        text = (folder / "__init__.py").read_text()
        zoo = re.findall(r"\w+", text.partition("favor.models import ")[2].partition("#")[0])
        for empty in (home / "favor/__init__.py", *(folder / f"{name}.py" for name in zoo)):
            empty.touch()
    assert python("-c", MIXED, one, one, part) == ""
    assert python("-c", MIXED, wheel, wheel / "favor", part) == ""
    message = python("-c", MIXED, one, other, part)
    assert str(one / "favor") in message
    assert str(other / part) in message
    assert "two checkouts" in message
