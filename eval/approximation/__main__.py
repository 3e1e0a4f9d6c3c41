"""Error of linear attention on a pretrained model, per head and of the whole model."""

from __future__ import annotations

import argparse
import copy
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import favor
from favor.config import BACKEND, FavorConfig, feature_family
from favor.eval.approximation import model as whole
from favor.eval.approximation import report
from favor.eval.approximation.heads import HeadErrors
from favor.eval.approximation.text import TextSamples
from favor.eval.approximation.variants import Variant, chosen_name, variants_of
from favor.eval.common import report as common
from favor.eval.options.approximation import parse_arguments
from favor.integrations.layer import attention_modules, stored_choice
from favor.train.common.pretrained import load_exact
from favor.train.common.program import program
from favor.train.text.glue_data import load_glue
from favor_command.saved import read_config


def converted(folders: Sequence[str], device: torch.device) -> dict[Variant, Any]:
    """Loads converted checkpoints, by the variants that describe them."""
    models = {}
    for folder in folders:
        model = whole.text_part(load_exact(folder)).to(device).eval()
        options = model.config.favor
        name = Path(folder).name
        saved = (getattr(read_config(folder), "favor", None) or {}).get(BACKEND)
        backend = saved if saved in favor.BACKENDS else "favor#"
        features = feature_family(backend, FavorConfig.from_dict(options))[0] if backend == "favor#" else None
        layers = (getattr(model.config, "favor_layers", None) or {}).values()
        number = 0 if any("num_features" in layer for layer in layers) else options["num_features"]
        own = (number, options["window"], name, options["statistics"])
        models[Variant(backend, features, *own)] = model
    return models


def similarity(model: Any, others: dict[Variant, Any], found: Sequence[Variant], tokenizer: Any, arguments: Any):
    """Computes the Spearman correlation on STS-B's development set, exact and with each variant (more is better).

    Args:
        model: with exact attention; it has exact attention afterwards.
        others: converted models.
        found: the variants.
        tokenizer: that of the model.
        arguments: of the program.
    """
    rows = load_glue("stsb", arguments.glue_dir).evaluation["validation"]
    number = len(rows) if arguments.sts_pairs is None else arguments.sts_pairs
    rows = rows.select(range(min(number, len(rows))))
    pairs, labels = list(zip(rows["sentence1"], rows["sentence2"], strict=True)), rows["label"]
    exact, scores = whole.sentence_similarity(model, tokenizer, pairs, labels), {}
    for variant in found:
        # Sentences are shorter than a window, so attention with a window would be exact.
        if variant.is_backend and not variant.window:
            switched = whole.switch(others.get(variant, model), variant, arguments.seed)
            scores[variant] = whole.sentence_similarity(switched, tokenizer, pairs, labels)
    whole.switch(model, None, arguments.seed)
    return exact, scores, len(pairs)


def chosen(source: Any, arguments: argparse.Namespace) -> dict[Variant, Any]:
    """Converts copies of the model to landmarks, with settings of each layer, by the variants that describe them.

    Args:
        source: of samples, `TextSamples` or `Recordings`.
        arguments: of the program.
    """
    models = {}
    inputs = source.inputs_to_choose() if arguments.flop_budgets else []
    for budget in arguments.flop_budgets:
        model = copy.deepcopy(source.model)
        favor.convert(model, "landmark", dataloader=inputs, layers="auto", flop_budget=budget)
        models[Variant("landmark", None, 0, 0, chosen_name(budget))] = model
    return models


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the report and writes it."""
    arguments = parse_arguments(argv)
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source: Any = None
    if arguments.text is None:
        from favor.eval.approximation.audio import Recordings  # its packages are those of another extra

        source = Recordings(arguments, device)
    else:
        source = TextSamples(arguments, device)
    lists = (arguments.num_features, arguments.windows, arguments.selected_keys)
    own = chosen(source, arguments)
    others = {**converted(arguments.adapted, device), **own}
    found = [*variants_of(arguments.backends, *lists), *others]
    measured = []
    for size in source.sizes:
        measured.append(source.measured(size, found, others))
        print(f"{measured[-1].length} keys measured, {time.perf_counter() - started:.0f} s", flush=True)
    sts = None
    if isinstance(source, TextSamples) and arguments.glue_dir and whole.measure_of(source.model) == "cosine":
        sts = similarity(source.model, others, found, source.tokenizer, arguments)
    words = [Path(word).name if "/" in word and Path(word).exists() else word for word in argv or sys.argv[1:]]
    if "--output_dir" in words:
        place = words.index("--output_dir")
        words[place : place + 2] = []
    context = common.context(f"python -m favor.eval.approximation {shlex.join(words)}", ("transformers",))
    facts = {
        **source.facts(measured),
        "queries": f"errors on at most {arguments.query_samples} queries of each sample, spread over it",
        "seed": arguments.seed,
        "machine": context["machine"],
        "versions": ", ".join(f"{name} {version}" for name, version in context["versions"].items()),
        "command": f"`{context['command']}`",
        "seconds": round(time.perf_counter() - started),
    }
    settings = {variant: entries(model, measured[-1].heads) for variant, model in own.items()}
    results = report.Results(facts, whole.measure_of(source.model), measured, sts, settings)
    report.write(results, arguments.output_dir, arguments.name)
    print("\n".join(report.lines(results)))
    return 0


def entries(model: Any, heads: HeadErrors) -> list[dict[str, Any]]:
    """Lists the entries of `config.favor_layers` of the layers that were measured, in their order."""
    modules = attention_modules(model)
    return [stored_choice(modules[layer]) for layer in sorted(next(iter(heads.errors.values())))]


cli = program("favor.eval.approximation", main)


if __name__ == "__main__":
    cli()
