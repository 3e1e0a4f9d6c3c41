"""Parts that the programs of this folder share: options, and variants of attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import Cache, DynamicCache, PreTrainedModel

import favor
from favor.config import FavorConfig, feature_family
from favor.eval.approximation.variants import parse
from favor.eval.common import report
from favor.eval.common.processes import in_turns
from favor.eval.common.program import add_results, device_or_default
from favor.train.common.program import Parser

CACHES = ("dynamic", "state")
EXACT, SDPA = "exact", "sdpa"
# More keys than any text here has.
ALWAYS = 2**40
P = TypeVar("P")
Found = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row of a table: an attention backend, all its options, and its cache, under the text that the user wrote.

    "exact" and "sdpa" are softmax attention; "exact" runs layers with a sliding window block by block, which gives the
    same numbers in linear time. The cache "dynamic" is transformers' `DynamicCache`, "state" is `favor.FavorCache`.
    """

    label: str
    backend: str
    options: Mapping[str, Any]
    cache: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Reads exact, sdpa or `BACKEND[:FEATURES][:KEY=VALUE,...]`, such as `landmark:selected_keys=512`."""
        if text in (EXACT, SDPA):
            return cls(text, text, FavorConfig.from_dict({"exact_below": ALWAYS}).to_dict(), "dynamic")
        backend, features, options = parse(text)
        cache = options.pop("cache", "state")
        if cache not in CACHES:
            raise ValueError(f"cache must be one of {', '.join(CACHES)}; got {cache!r}")
        given = options if features is None else {"features": features, **options}
        config = FavorConfig.from_dict({"exact_below": 0, **given})
        feature_family(backend, config, given=given)
        return cls(text, backend, config.to_dict(), cache)

    def apply(self, model: PreTrainedModel) -> None:
        """Switches the attention of a model; layers with a sliding window stay exact."""
        if self.backend == SDPA:
            model.set_attn_implementation(SDPA)
        else:
            favor.configure(model, "landmark" if self.backend == EXACT else self.backend, **self.options)

    def new_cache(self, model: PreTrainedModel) -> Cache:
        """Makes an empty cache for `model`."""
        return DynamicCache(config=model.config) if self.cache == "dynamic" else favor.FavorCache(model.config)


def variants(texts: Sequence[str]) -> list[Variant]:
    """Reads variants, exact attention first, each once."""
    found = [Variant.parse(text) for text in dict.fromkeys(texts)]
    exact = [variant for variant in found if variant.backend in (EXACT, SDPA)] or [Variant.parse(EXACT)]
    return [*exact, *(variant for variant in found if variant not in exact)]


def options(parser: Parser, name: str) -> None:
    """Adds the options of both programs; `name` is the default file name of the results."""
    add = parser.add_argument
    text = 'folder of a causal language model, or "gemma" (its packages, its terms of use)'
    parser.add_place("model_name_or_path", "model", text)
    text = "backends to compare, such as landmark:selected_keys=512; exact attention always comes first"
    add("--backends", nargs="+", default=["exact", "landmark"], metavar="BACKEND[:KEY=VALUE,...]", help=text)
    text = "tokens of a prompt or a sample; several are compared"
    add("--lengths", nargs="+", type=int, default=[2048, 4096], metavar="L", help=text)
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--device", help="device to run on; default: cuda if there is a GPU, else cpu")
    add_results(parser, name)


def prepare(parser: Parser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line; sorts `lengths`, makes `variants` of `backends`, opens the records of `NAME.jsonl`."""
    arguments = parser.parse_args(words)
    arguments.lengths = sorted(set(arguments.lengths))
    arguments.device = device_or_default(arguments.device)
    try:
        arguments.variants = variants(arguments.backends)
    except TypeError as error:
        raise ValueError(str(error)) from error
    arguments.records = report.Records(arguments.output_dir / f"{arguments.name}.jsonl")
    return arguments


def measured(
    records: report.Records, pieces: Iterable[tuple[Found, P]], measure: Callable[[P], Found]
) -> Iterator[tuple[P, Found, bool]]:
    """Measures pieces, each after its description, that are not in the records; several processes share them.

    Yields each piece, its result, and whether it is new.
    """
    for (of, piece), result in in_turns(pieces, lambda one: records.find(one[0]) or measure(one[1])):
        if is_new := records.find(of) is None:
            records.add(of, result)
        yield piece, result, is_new


def context(program: str, argv: Sequence[str] | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Gives command, machine, versions, model and variants."""
    facts = {"model": Path(arguments.model).resolve().name, "seed": arguments.seed}
    found = report.context_of(program, argv, ("transformers",))
    return {**found, **facts, "variants": [v.label for v in arguments.variants]}
