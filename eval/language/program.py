"""Parts that the programs of this folder share: their options, and facts about the run for their results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor.eval.common import report
from favor.eval.common.program import add_results, device_or_default
from favor.eval.language.records import Records
from favor.eval.language.variants import CACHES, variants
from favor.train.common.program import Parser


def options(parser: Parser, name: str) -> None:
    """Adds the options of both programs.

    Args:
        parser: of the program.
        name: default file name of the results.
    """
    add = parser.add_argument
    text = 'folder of a causal language model, or "gemma" (its packages, its terms of use)'
    parser.add_place("model_name_or_path", "model", text)
    add(
        "--backends",
        nargs="+",
        default=["exact", "landmark"],
        metavar="BACKEND[:KEY=VALUE,...]",
        help="backends to compare, such as landmark:selected_keys=512; exact attention always comes first",
    )
    add(
        "--cache",
        choices=CACHES,
        default="auto",
        help="cache of backends that name none, see favor.eval.language.variants",
    )
    length_help = "tokens of a prompt or a sample; several are compared"
    add("--lengths", nargs="+", type=int, default=[2048, 4096], metavar="L", help=length_help)
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--device", help="device to run on; default: cuda if there is a GPU, else cpu")
    add(
        "--merge",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="records of other runs that belong to this table",
    )
    add_results(parser, name)


def prepare(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line; sorts `lengths`, makes `variants` of `backends`, opens the records of `NAME.jsonl`."""
    arguments = parser.parse_args(words)
    arguments.lengths = sorted(set(arguments.lengths))
    arguments.device = device_or_default(arguments.device)
    try:
        arguments.variants = variants(arguments.backends, arguments.cache)
    except TypeError as error:
        raise ValueError(str(error)) from error
    arguments.records = Records(arguments.output_dir / f"{arguments.name}.jsonl", arguments.merge)
    return arguments


def context(program: str, words: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Gives command, machine, versions, model and variants.

    Args:
        program: module name.
        words: the command line.
        arguments: of the program.
    """
    command = report.shown_command(program, report.local_names(words), [], ["--output_dir"])
    facts = {"model": Path(arguments.model).resolve().name, "seed": arguments.seed}
    return {**report.context(command, ("transformers",)), **facts, "variants": [v.label for v in arguments.variants]}
