"""How close linear attention is to softmax on a pretrained model, head by head and end to end.

    python -m favor.eval.approximation MODEL --text book.txt --results eval/results
    python -m favor.eval.approximation --text book.txt --length 512 4096 --backends landmark:window=64 favor#:wderf

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) sees real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values; the
error is |output - exact| / |exact|, Frobenius norms over the sequence. Beside them stand two baselines, the mean of the
values and exact attention inside the window with nothing outside, and diagnostics: rho and the norms of x and y. End to
end, the whole model runs with the backend in every layer: cosine of mean-pooled embeddings to the exact ones, masked-LM
loss or perplexity, as the model has it. `--data_dir GLUE` adds the Spearman correlation on STS-B. `--converted DIR ...`
adds checkpoints from `favor.train.distill` or `favor.convert`, made from MODEL.

Several lengths give a table by length. Where a sample has more tokens than the model has positions, the positions
repeat, so that tokens keep the statistics of those the model knows.
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
from favor.eval.approximation.heads import HeadErrors
from favor.eval.approximation.variants import Variant, variants_of
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
    parser.add_argument("--length", nargs="+", type=int, default=[512], help="tokens of a sample; several are compared")
    parser.add_argument(
        "--position_period",
        type=int,
        help="position of token i is i modulo this; default: the positions of the model, if a sample has more tokens",
    )
    parser.add_argument(
        "--query_samples",
        type=int,
        default=1024,
        help="errors are measured on at most so many queries of a sample; backends compute all",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="what is compared; options given here replace the lists below",
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[64, 128, 256],
        help="random features, or landmarks, per head; several are compared",
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks; 0 for none")
    parser.add_argument("--selected_keys", nargs="+", type=int, default=[], help="of landmarks; several are compared")
    parser.add_argument("--converted", nargs="*", default=[], help="checkpoints made from MODEL")
    parser.add_argument("--data_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    parser.add_argument("--sts_pairs", type=int, help="so many pairs of STS-B; default all")
    parser.add_argument("--seed", type=int, default=0, help="of random directions and masks")
    parser.add_argument("--results", type=Path, default=Path("eval/results"), help="folder of the results")
    parser.add_argument("--name", default="approximation", help="file name of the results, without ending")
    arguments = parser.parse_args(argv)
    arguments.length = sorted(set(arguments.length))
    numbers = (*arguments.length, arguments.samples, arguments.query_samples)
    if min(numbers) < 1 or (arguments.position_period is not None and arguments.position_period < 1):
        parser.error("--length, --samples, --query_samples and --position_period must be at least 1")
    return arguments


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


def measure(
    model: Any, others: dict[Variant, Any], found: Sequence[Variant], tokenizer: Any, arguments: Any, length: int
) -> report.Measured:
    """Errors of heads, and the score of the whole model with exact attention and with each variant, at one length."""
    seed, period = arguments.seed, arguments.position_period
    ids = samples(arguments.text, tokenizer, length, arguments.samples, seed)
    modules = {variant.folder: attention_modules(other) for variant, other in others.items() if variant.folder}
    heads = HeadErrors(found, seed, arguments.query_samples, modules)
    places = whole.placement(model, length, period)
    with torch.no_grad(), observe(model, heads):
        for sample in ids.split(1):
            model(input_ids=sample.to(model.device), **places)
    kind, inputs = whole.measure_of(model), (ids, tokenizer.mask_token_id, seed, period)
    exact, scores = whole.outputs(model, *inputs), {}
    for variant in found:
        if variant.is_backend:
            switched = whole.switch(others.get(variant, model), variant, seed)
            scores[variant] = whole.score(kind, exact, whole.outputs(switched, *inputs))
    whole.switch(model, None, seed)
    return report.Measured(length, len(ids), heads, whole.score(kind, exact, exact), scores)


def similarity(model: Any, others: dict[Variant, Any], found: Sequence[Variant], tokenizer: Any, arguments: Any):
    """Spearman correlation on STS-B's development set, exact and with each variant."""
    rows = load_glue("stsb", arguments.data_dir).evaluation["validation"]
    number = len(rows) if arguments.sts_pairs is None else arguments.sts_pairs
    rows = rows.select(range(min(number, len(rows))))
    pairs, labels = list(zip(rows["sentence1"], rows["sentence2"], strict=True)), rows["label"]
    exact, scores = whole.sentence_similarity(model, tokenizer, pairs, labels), {}
    for variant in found:
        # Sentences are shorter than a window, which would make attention exact.
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
        measured.append(measure(model, others, found, tokenizer, arguments, length))
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
        "positions": positions(model, arguments),
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


def positions(model: Any, arguments: argparse.Namespace) -> str:
    """Says in words which positions the tokens have."""
    places = whole.placement(model, arguments.length[-1], arguments.position_period)
    if not places:
        return "0, 1, 2, ..."
    ids = places["position_ids"][0]
    return f"repeat every {int((ids - ids[0]).max()) + 1} tokens in longer samples"


cli = program("favor.eval.approximation", main)


if __name__ == "__main__":
    cli()
