"""Which models of transformers run with a FAVOR backend, and whether their outputs are right.

    python -m favor.eval.compatibility                        # all classes, about ten minutes on two cores
    python -m favor.eval.compatibility --model_types bert llama    # some

A tiny model with random weights is built of every model class of the installed transformers. It runs with exact
attention, with landmarks that lose nothing, which are softmax attention too, and with few random features, whose output
must differ.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from favor.eval.common.isolated import Failure, isolated
from favor.eval.common.program import add_results
from favor.eval.common.report import context_of, table_row, write
from favor.eval.compatibility.check import BAD, CATEGORIES, Candidate, timed_check
from favor.train.common.program import Parser, did_you_mean, program

MEMORY = 12 * 2**30
# A model with a head has the attention of its body: if a file has bodies, models with heads are left out.
_HEAD = re.compile(r"For[A-Z]|With|Pretrain|LMHead|DoubleHeads|Wrapper$")
_MEANING = {
    "equal": "with landmarks that lose nothing the output is that of exact attention, to 1e-4 relative",
    "local": "all layers see a window or a chunk only; they stay exact, in linear time",
    "refused": "a ValueError says why, at loading or at the first pass",
    "no attention": "nothing in the class attends",
    "not built": "no tiny model could be made here; says nothing about the backends",
    "silently exact": "the name is accepted, and attention stays exact",
    "wrong": "the output is another",
    "crash": "an exception that is no refusal",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.compatibility", __doc__)
    add = parser.add_argument
    add("--model_types", nargs="+", metavar="FAMILY", help="folders of transformers, such as bert llama; default: all")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--time_limit", type=float, default=60, help="greatest processor time per class")
    add_results(parser, "compatibility")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1 or arguments.time_limit <= 0:
        parser.error("--jobs and --time_limit must be positive")
    try:
        arguments.found, arguments.missing = candidates(arguments.model_types)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def candidates(families: list[str] | None = None) -> tuple[list[Candidate], dict[str, str]]:
    """Lists the model classes to run: the bodies of each modeling file, or its first class if there is no body.

    Causal language models are always among them. Also gives why a module cannot be imported here, by name.
    """
    files = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
    known = {path.parent.name for path in files}
    if families and (unknown := sorted(set(families) - known)):
        near = did_you_mean(unknown[0], known)
        raise ValueError(f"transformers {transformers.__version__} has no models called {', '.join(unknown)}{near}")
    found, missing = [], {}
    for path in (path for path in files if not families or path.parent.name in families):
        module, text = f"transformers.models.{path.parent.name}.{path.stem}", path.read_text()
        if not re.search("ALL_ATTENTION_FUNCTIONS|[Aa]ttention|softmax", text):
            continue
        try:
            names = _model_classes(module)
        except ImportError as error:
            missing[module] = str(error).strip().splitlines()[0]
            continue
        bodies = [name for name in names if not _HEAD.search(name)]
        kept = bodies or names[:1]
        kept += [name for name in names if name.endswith("ForCausalLM") and name not in kept]
        found += [Candidate(path.parent.name, module, name) for name in kept]
    return found, missing


def _model_classes(module: str) -> list[str]:
    found = importlib.import_module(module)
    return [
        name
        for name, value in vars(found).items()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module
        and value.config_class is not None
        and not name.endswith("PreTrainedModel")
    ]


def run_all(found: list[Candidate], jobs: int, seconds: int) -> Iterator[dict[str, Any]]:
    """Checks each class in a process of its own, and yields each result when it is ready."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(isolated, MEMORY, 1, timed_check, own, seconds): own for own in found}
        for future in as_completed(running):
            result, own = future.result(), running[future]
            if isinstance(result, Failure):
                facts = {"family": own.family, "class": own.name}
                limits = f"limits: {seconds} seconds of processor time, {MEMORY / 2**30:g} GiB"
                result = {**facts, "category": "not built", "reason": f"{result.reason}; {limits}"}
            yield result


def lines_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes the report in Markdown."""
    counts = Counter(result["category"] for result in results)
    families = {result["family"] for result in results}
    return [
        "# Models of transformers with a FAVOR backend",
        "",
        f"{len(results)} model classes of {len(families)} families, tiny, with random weights, float32 on a CPU: exact "
        "attention, landmarks with a mean for every key, landmarks that select all keys (both are softmax attention), "
        "and 4 random features, which must differ. Token models with padding at the right and at the left too.",
        "",
        *(table_row(row) for row in (["category", "classes", "meaning"], ["---", "---:", "---"])),
        *(table_row([name, str(counts[name]), _MEANING[name]]) for name in CATEGORIES),
        "",
        f"Bad categories: {', '.join(BAD)}.",
        "",
        "## By family",
        "",
        *family_lines(results),
        *differing_lines(results),
    ]


def differing_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes a Markdown table of the classes for which transformers' own "sdpa" and "eager" differ; empty if none."""
    lines = ["", "## Where sdpa and eager differ", ""]
    lines += ["Relative errors between the two, without a backend of favor.", ""]
    lines += [table_row(["class", "batches", "favor"]), table_row(["---"] * 3)]
    head = len(lines)
    for result in (result for result in results if result.get("sdpa_and_eager_differ")):
        apart = ", ".join(f"{name} {error:.0e}" for name, error in result["sdpa_and_eager_differ"].items())
        reason = f": {_short(result['reason'])}" if result["reason"] else ""
        lines.append(table_row([result["class"], apart, f"{result['category']}{reason}"]))
    return lines if len(lines) > head else []


def family_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes a Markdown table with one line per family: its classes by category, its caches, and reasons."""
    lines = [table_row(["family", "classes", "FavorCache", "reason"]), table_row(["---"] * 4)]
    for family in sorted({result["family"] for result in results}):
        own = [result for result in results if result["family"] == family]
        counts = Counter(result["category"] for result in own)
        cells = ", ".join(f"{counts[name]} {name}" for name in CATEGORIES if counts[name])
        caches = sorted({_short(one["cache"]) for one in own if not one.get("cache", "not run").startswith("not")})
        reasons = [_short(one["reason"]) for one in own if one["category"] != "no attention" and one["reason"]]
        lines.append(table_row([family, cells, "; ".join(caches), "; ".join(dict.fromkeys(reasons[:3]))]))
    return lines


def _short(text: str) -> str:
    """Gives the first sentence, at most 110 characters, safe in a table."""
    text = text.split(". ")[0].replace("|", "/")
    return text if len(text) <= 110 else f"{text[:107]}..."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a class is in a bad category."""
    arguments = parse_arguments(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = arguments.found
    content = context_of("favor.eval.compatibility", argv, ("transformers",))
    content |= {"cannot be imported": arguments.missing, "classes": []}
    results = content["classes"]
    for number, result in enumerate(run_all(found, arguments.jobs, math.ceil(arguments.time_limit)), 1):
        results.append(result)
        print(f"{result['family']}.{result['class']}: {result['category']} {result['reason'][:150]}", flush=True)
        if number % 50 == 0 or number == len(found):  # a long run that is stopped leaves its results so far
            results.sort(key=lambda result: (result["family"], result["class"]))
            write(arguments.output_dir, arguments.name, lines_of(results), content, [])
    counts = Counter(result["category"] for result in results)
    print(", ".join(f"{counts[name]} {name}" for name in CATEGORIES))
    return 1 if any(counts[name] for name in BAD) else 0


cli = program("favor.eval.compatibility", main)

if __name__ == "__main__":
    cli()
