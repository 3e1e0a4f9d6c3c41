"""Error of linear attention on a pretrained model, per head and of the whole model."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import favor
from favor.config import FavorConfig, feature_family
from favor.eval.approximation import model as whole
from favor.eval.approximation import report
from favor.eval.approximation.measure import measure
from favor.eval.approximation.variants import Variant, variants_of
from favor.eval.common import report as common
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.options.approximation import parse_arguments
from favor.train.common.pretrained import load_exact
from favor.train.common.program import program
from favor.train.text.glue_data import load_glue
from favor.train.text.samples import samples


def converted(folders: Sequence[str], device: torch.device) -> dict[Variant, Any]:
    """Loads converted checkpoints, by the variants that describe them."""
    models = {}
    for folder in folders:
        model = load_exact(folder).to(device).eval()
        options = model.config.favor
        name = Path(folder).name
        backend = model.config._attn_implementation if model.config._attn_implementation in favor.BACKENDS else "favor#"
        features = feature_family(backend, FavorConfig.from_dict(options))[0] if backend == "favor#" else None
        own = (options["num_features"], options["window"], name, options["statistics"])
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
    rows = load_glue("stsb", arguments.data_dir).evaluation["validation"]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the report and writes it."""
    arguments = parse_arguments(argv)
    started = time.perf_counter()
    path = arguments.model or str(minilm_path())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, model = AutoTokenizer.from_pretrained(path), load_exact(path).to(device).eval()
    lists = (arguments.num_features, arguments.windows, arguments.selected_keys)
    others = converted(arguments.converted, device)
    found = [*variants_of(arguments.backends, *lists), *others]
    measured = []
    for length in arguments.length:
        ids = samples(arguments.text, tokenizer, length, arguments.samples, arguments.seed)
        options = {"seed": arguments.seed, "query_samples": arguments.query_samples}
        options |= {"period": arguments.position_period, "mask_id": tokenizer.mask_token_id}
        measured.append(measure(model, ids, found, others=others, **options))
        print(f"{length} tokens measured, {time.perf_counter() - started:.0f} s", flush=True)
    sts = None
    if arguments.data_dir and whole.measure_of(model) == "cosine":
        sts = similarity(model, others, found, tokenizer, arguments)
    words = [Path(word).name if "/" in word and Path(word).exists() else word for word in argv or sys.argv[1:]]
    if "--results" in words:
        place = words.index("--results")
        words[place : place + 2] = []
    context = common.context(f"python -m favor.eval.approximation {shlex.join(words)}", ("transformers",))
    number = ", ".join(str(each.samples) for each in measured) if len({e.samples for e in measured}) > 1 else None
    lengths = ", ".join(str(length) for length in arguments.length)
    facts = {
        "model": Path(path).name if arguments.model else f"the 6-layer MiniLM BERT of the PyPI package {PACKAGE}",
        "text": f"{number or measured[0].samples} samples of {lengths} tokens of {Path(arguments.text).name}",
        "positions": whole.positions(model, arguments.length[-1], arguments.position_period),
        "queries": f"errors on at most {arguments.query_samples} queries of each sample, spread over it",
        "seed": arguments.seed,
        "machine": context["machine"],
        "versions": ", ".join(f"{name} {version}" for name, version in context["versions"].items()),
        "command": f"`{context['command']}`",
        "seconds": round(time.perf_counter() - started),
    }
    results = report.Results(facts, whole.measure_of(model), measured, sts)
    report.write(results, arguments.results, arguments.name)
    print("\n".join(report.lines(results)))
    return 0


cli = program("favor.eval.approximation", main)


if __name__ == "__main__":
    cli()
