"""Facts that a causal language model finds in a long text: RULER's tasks in novels, by length and depth.

    python -m favor.eval.language.needle MODEL --text novels.txt.xz --backends exact landmark:selected_keys=512

MODEL is a folder, or "gemma" (Gemma 3 270M from packages of PyPI: an optional experiment under its own terms of use).
Tasks: a single needle, several keys, several values, variables that pass a number on, and common words. Prompts end
where the answer begins, for base models. A document is read once; each question continues from a copy of the cache,
greedily and token by token. Accuracy is the fraction of the expected parts that the answer contains (more is better).
Nats are per token of the right answer, given earlier tokens (less is better).

Documents depend on seed, task, length and number alone. The results of each are kept in NAME.jsonl: the same command
continues where it was stopped. `--together` hides the facts of all tasks in one document, which takes a quarter of the
time and is a little harder. NAME.json has the accuracy at each depth.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from favor.eval.common import report
from favor.eval.common.processes import processes, shared_program
from favor.eval.language import program as shared
from favor.eval.language.models import load
from favor.eval.language.program import Variant
from favor.eval.language.tasks import HIDDEN, TASKS, Document, Haystack, Prompt
from favor.train.common.program import Parser
from favor.train.text.samples import read_text

NAME = "favor.eval.language.needle"
DEPTHS = 10  # evenly spaced places that the documents take in turns
# Tokens read at a time. Local layers then hold the mask of a piece and not that of the whole document, which saves most
# of the memory and time of a long one.
PIECE = 2048
TIMES = "Seconds: to read a document, and for all its answers"
Key = tuple[str, str, int]  # task, variant, length
Cell = dict[str, Any]


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones, raises ValueError for bad variants."""
    parser = Parser(NAME, __doc__)
    shared.options(parser, "needle")
    add = parser.add_argument
    add("--text", required=True, help="text in which facts are hidden: UTF-8, plain, .gz or .xz")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks to run")
    add("--together", action="store_true", help="hide the facts of all tasks but common in one document")
    add("--cases", type=int, default=10, help="documents of each task and length")
    arguments = shared.prepare(parser, words)
    if min(*arguments.lengths, arguments.cases) < 1:
        parser.error("--lengths and --cases must be at least 1")
    arguments.tasks = [task for task in TASKS if task in arguments.tasks]
    return arguments


@torch.no_grad()
def answer(model: Any, tokenizer: Any, variant: Variant, document: Document) -> dict[str, Any]:
    """Generates all answers of a document, greedy and token by token.

    Gives "seconds" of the document and of all answers, and "answers": for each question its task, depth, generated
    text, "score" (the part of what is expected that it contains) and "nats" (per token of the target).
    """
    variant.apply(model)
    cache, start = variant.new_cache(model), time.perf_counter()
    _read(model, cache, [document.ids])
    read = time.perf_counter()
    found = []
    for prompt in document.prompts:
        tokens, nats = _go_on(model, copy.deepcopy(cache), prompt)
        text, question = tokenizer.decode(tokens), prompt.question
        score = fmean(part in text for part in question.answers)
        facts = {"task": question.task, "depth": question.depth, "text": text}
        found.append({**facts, "score": score, "nats": fmean(nats)})
    return {"seconds": [read - start, time.perf_counter() - read], "answers": found}


def _go_on(model: Any, cache: Any, prompt: Prompt) -> tuple[list[int], list[float]]:
    """Continues a prompt by as many tokens as its target has, and reads the target too: a batch of two.

    Gives the tokens that the model chose, and the nats of the target's tokens. The cache of the document is changed.
    """
    logits = _read(model, cache, [prompt.ids])
    cache.batch_repeat_interleave(2)
    said, nats = [], []
    for place, wanted in enumerate(prompt.target):
        said.append(int(logits[0].argmax()))
        nats.append(-float(logits[-1].log_softmax(-1)[wanted]))
        if place + 1 < len(prompt.target):
            logits = _read(model, cache, [[said[-1]], [wanted]])
    return said, nats


def _read(model: Any, cache: Any, ids: list[list[int]]) -> torch.Tensor:
    """Reads tokens `[batch, n]` after those in the cache; gives the logits after the last, `[batch, vocabulary]`."""
    for piece in torch.tensor(ids, device=model.device).split(PIECE, 1):
        logits = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float()


def documents(haystack: Haystack, arguments: argparse.Namespace) -> Iterator[tuple[int, int, Document]]:
    """Yields length, number and document of all documents, short ones first."""
    hidden = [task for task in arguments.tasks if task in HIDDEN]
    groups = [[task] for task in arguments.tasks]
    if arguments.together and hidden:
        groups = [hidden, *(group for group in groups if group[0] not in hidden)]
    for length, case, tasks in itertools.product(arguments.lengths, range(arguments.cases), groups):
        yield length, case, haystack.document(tasks, length, case, DEPTHS, arguments.seed)


def measure(
    model: Any, haystack: Haystack, arguments: argparse.Namespace, called: str
) -> tuple[dict[Key, Cell], dict[tuple[str, int], list[float]]]:
    """Measures all documents; what is in the records is not measured again."""
    answers: dict[Key, list[dict[str, Any]]] = {}
    seconds: dict[tuple[str, int], list[list[float]]] = {}

    def pieces() -> Iterator[tuple[dict[str, str], tuple[Variant, int, int, Document]]]:
        for length, own in itertools.groupby(documents(haystack, arguments), lambda one: one[0]):
            # Neighbours, which several processes measure at a time, take about as long.
            for variant, (_, case, document) in itertools.product(arguments.variants, own):
                of = {"model": called, "document": document.digest, "variant": variant.label, "cache": variant.cache}
                yield of, (variant, length, case, document)

    def answers_of(piece: tuple[Variant, int, int, Document]) -> dict[str, Any]:
        variant, *_, document = piece
        return answer(model, haystack.tokenizer, variant, document)

    for (variant, length, case, _), result, is_new in shared.measured(arguments.records, pieces(), answers_of):
        if is_new:
            said = ", ".join(f"{a['task']} {a['score']:.2g} ({a['nats']:.2f})" for a in result["answers"])
            took = " + ".join(f"{part:.1f}" for part in result["seconds"])
            processes().print(f"{length} tokens, case {case}, {variant.label}: {said}; {took} s", flush=True)
        for found in result["answers"]:
            answers.setdefault((found["task"], variant.label, length), []).append(found)
        seconds.setdefault((variant.label, length), []).append(result["seconds"])
    labels = [variant.label for variant in arguments.variants]
    keys = itertools.product(arguments.tasks, labels, arguments.lengths)
    means = {key: [float(mean) for mean in np.mean(own, 0).round(3)] for key, own in seconds.items()}
    return {key: cell(key, answers[key]) for key in keys}, means


def cell(key: Key, answers: Sequence[Mapping[str, Any]]) -> Cell:
    """Computes the means of one task, variant and length; those by depth only for facts at one place."""
    depths = sorted({one["depth"] for one in answers} - {None})
    return {
        **dict(zip(("task", "variant", "length"), key, strict=True)),
        "answers": len(answers),
        "accuracy": fmean(one["score"] for one in answers),
        "nats": fmean(one["nats"] for one in answers),
        "by_depth": {f"{d:g}": fmean(one["score"] for one in answers if one["depth"] == d) for d in depths},
    }


def report_lines(
    cells: Mapping[Key, Cell],
    seconds: Mapping[tuple[str, int], Sequence[float]],
    context: Mapping[str, Any],
    arguments: argparse.Namespace,
) -> list[str]:
    """Writes the Markdown report."""
    how = "the facts of all tasks but common words in one document" if arguments.together else "one for each task"
    found = [
        "# What is found in a long text",
        "",
        f"Model {context['model']}, float32; {arguments.cases} documents a task and length, from "
        f"{Path(arguments.text).name}; {how}; seed {arguments.seed}. Accuracy in % (nats of a token of the right "
        "answer): more of the first, less of the second is better. Answers are generated greedily, token by token, "
        "with the cache; multikey asks for each of its keys.",
        "",
        *(f"- `{variant.label}`: cache {variant.cache}" for variant in arguments.variants),
    ]
    header = ["attention", *(f"{n} tokens" for n in arguments.lengths)]
    tables: dict[str, list[list[str]]] = {name: [] for name in (*arguments.tasks, TIMES)}
    for variant in (each.label for each in arguments.variants):
        for task in arguments.tasks:
            own = (cells[task, variant, length] for length in arguments.lengths)
            shown = [f"{100 * one['accuracy']:.0f} ({one['nats']:.2f})" for one in own]
            tables[task].append([f"`{variant}`", *shown])
        times = (seconds[variant, length] for length in arguments.lengths)
        tables[TIMES].append([f"`{variant}`", *(f"{read:.3g} + {asked:.3g}" for read, asked in times)])
    for name, rows in tables.items():
        found += ["", f"## {name}", "", *report.table(header, rows)]
    return found


def checks(cells: Mapping[Key, Cell], arguments: argparse.Namespace) -> list[report.Check]:
    """Checks that each variant finds at least 95 % of the needles that exact attention finds."""
    exact, *others = (variant.label for variant in arguments.variants)
    found = []
    for task, variant in itertools.product([one for one in arguments.tasks if one in ("single", "multikey")], others):
        pairs = [[cells[task, name, length] for name in (variant, exact)] for length in arguments.lengths]
        counts = [[one["accuracy"] * one["answers"] for one in pair] for pair in pairs]
        numbers = ", ".join(f"{n}: {a:g} of {b:g}" for n, (a, b) in zip(arguments.lengths, counts, strict=True))
        statement = f"{variant} finds at least 95 % of what {exact} finds, task {task}, at every length"
        found.append(report.Check(statement, numbers, all(own >= 0.95 * most for own, most in counts)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    arguments = parse_arguments(argv)
    text = read_text(arguments.text)
    model, tokenizer = load(arguments.model, arguments.device)
    context = shared.context(NAME, argv, arguments)
    cells, seconds = measure(model, Haystack(text, tokenizer), arguments, context["model"])
    lines, checked = report_lines(cells, seconds, context, arguments), checks(cells, arguments)
    times = [{"variant": key[0], "length": key[1], "seconds": own} for key, own in seconds.items()]
    content = {**context, "cells": list(cells.values()), "seconds": times}
    report.finish(arguments, lines, content, checked)
    return 0


cli = shared_program(NAME, main)


if __name__ == "__main__":
    cli()
