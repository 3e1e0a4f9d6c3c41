"""How close linear attention is to softmax on a pretrained model, head by head and end to end.

    python -m favor.eval.approximation MODEL --text book.txt --results eval/results

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) sees real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values; the
error is |output - exact| / |exact|, Frobenius norms over the sequence. Beside them stand two baselines, the mean of the
values and exact attention inside the window with nothing outside, and diagnostics: rho and the norms of x and y. End to
end, the whole model runs with the backend in every layer: cosine of mean-pooled embeddings to the exact ones, masked-LM
loss or perplexity, as the model has it. `--data_dir GLUE` adds the Spearman correlation on STS-B. `--converted DIR ...`
adds checkpoints from `favor.train.distill` or `favor.convert`, made from MODEL.
"""

from __future__ import annotations

import argparse
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
from favor.eval.approximation.heads import LOCAL, MEAN, HeadErrors, Variant
from favor.eval.common import report as common
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.integrations.adapt.observe import observe
from favor.integrations.layer import attention_modules
from favor.train.common.pretrained import load_exact
from favor.train.common.program import Parser, program
from favor.train.text.glue_data import load_glue
from favor.train.text.samples import samples

COMPARED = ("favor+", "favor++", "favor#:saderf", "favor#:sderf", "favor#:cderf", "favor#:wderf")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = Parser("favor.eval.approximation", __doc__, abbreviations=True)
    parser.add_argument("model", nargs="?", help=f"folder or hub name; default: the BERT in the package {PACKAGE}")
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    parser.add_argument(
        "--backends", nargs="+", default=list(COMPARED), metavar="NAME[:FEATURES]", help="what is compared"
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[64, 128, 256],
        help="random features, or landmarks, per head; several are compared",
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks; 0 for none")
    parser.add_argument("--converted", nargs="*", default=[], help="checkpoints made from MODEL")
    parser.add_argument("--data_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    parser.add_argument("--sts_pairs", type=int, help="so many pairs of STS-B; default all")
    parser.add_argument("--seed", type=int, default=0, help="of random directions and masks")
    parser.add_argument("--results", type=Path, default=Path("eval/results"), help="folder of the results")
    parser.add_argument("--name", default="approximation", help="file name of the results, without ending")
    return parser.parse_args(argv)


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """Baselines, and every backend with every number of features and window."""
    found = [Variant(MEAN, None, 0, 0), *(Variant(LOCAL, None, 0, window) for window in arguments.windows if window)]
    for name in arguments.backends:
        backend, _, features = name.partition(":")
        found += [
            Variant(backend, features or None, number, window)
            for window in arguments.windows
            for number in arguments.num_features
        ]
    return found


def converted(folders: Sequence[str], device: torch.device) -> dict[Variant, Any]:
    """Converted checkpoints, and the variants that they are."""
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


def end_to_end(model: Any, others: dict[Variant, Any], found: Sequence[Variant], ids: Any, mask: int | None, seed: int):
    """Score of exact attention, and of each variant."""
    measure, exact = whole.measure_of(model), whole.outputs(model, ids, mask, seed)
    scores = {}
    for variant in found:
        if whole.is_backend(variant):
            switched = whole.switch(others.get(variant, model), variant, seed)
            scores[variant] = whole.score(measure, exact, whole.outputs(switched, ids, mask, seed))
    whole.switch(model, None, seed)
    return whole.score(measure, exact, exact), scores


def similarity(model: Any, others: dict[Variant, Any], found: Sequence[Variant], tokenizer: Any, arguments: Any):
    """Spearman correlation on STS-B's development set, exact and with each variant."""
    rows = load_glue("stsb", arguments.data_dir).evaluation["validation"]
    number = len(rows) if arguments.sts_pairs is None else arguments.sts_pairs
    rows = rows.select(range(min(number, len(rows))))
    pairs, labels = list(zip(rows["sentence1"], rows["sentence2"], strict=True)), rows["label"]
    exact, scores = whole.sentence_similarity(model, tokenizer, pairs, labels), {}
    for variant in found:
        # Sentences are shorter than a window, which would make attention exact.
        if whole.is_backend(variant) and not variant.window:
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
    ids = samples(arguments.text, tokenizer, arguments.length, arguments.samples, arguments.seed)
    others = converted(arguments.converted, device)
    found = [*variants(arguments), *others]
    modules = {variant.folder: attention_modules(other) for variant, other in others.items() if variant.folder}
    heads = HeadErrors(found, arguments.seed, modules)
    with torch.no_grad(), observe(model, heads):
        for sample in ids.split(1):
            model(input_ids=sample.to(device))
    exact, scores = end_to_end(model, others, found, ids, tokenizer.mask_token_id, arguments.seed)
    sts = None
    if arguments.data_dir and whole.measure_of(model) == "cosine":
        sts = similarity(model, others, found, tokenizer, arguments)
    words = [Path(word).name if "/" in word and Path(word).exists() else word for word in argv or sys.argv[1:]]
    if "--results" in words:
        place = words.index("--results")
        words[place : place + 2] = []
    context = common.context(f"python -m favor.eval.approximation {shlex.join(words)}", ("transformers",))
    facts = {
        "model": Path(path).name if arguments.model else f"the 6-layer MiniLM BERT of the PyPI package {PACKAGE}",
        "text": f"{len(ids)} samples of {arguments.length} tokens of {Path(arguments.text).name}",
        "seed": arguments.seed,
        "machine": context["machine"],
        "versions": ", ".join(f"{name} {version}" for name, version in context["versions"].items()),
        "command": f"`{context['command']}`",
        "seconds": round(time.perf_counter() - started),
    }
    results = report.Results(facts, heads, whole.measure_of(model), exact, scores, sts)
    report.write(results, arguments.results, arguments.name)
    print("\n".join(report.lines(results)))
    return 0


cli = program("favor.eval.approximation", main)


if __name__ == "__main__":
    cli()
