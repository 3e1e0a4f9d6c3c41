"""Says what each attention layer of a model would run at some lengths, and what that costs.

    favor check FOLDER --lengths 512 8192 --attn_implementation landmark --num_features 128

The model is built from its config alone: no weights are loaded and nothing is run. Each layer is "linear", "exact",
"local" (exact within the sliding window of the model) or "refused". The exit code is 0 if some layer is linear at one
of the lengths, and 1 if none is.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from favor_command.program import Parser, program
from favor_command.saved import model_class, read_config

NAME = "favor check"
KEPT = ("exact", "local", "refused")
FOOT = (
    "linear and local: speed (more is better) and memory (less is better) of attention alone, estimated; "
    "exact attention over all keys is 1"
)


def parse_arguments(words: Sequence[str] | None) -> Any:
    """Parses the arguments."""
    parser = Parser(NAME, __doc__)
    parser.add_place(
        "model_name_or_path", "model", "folder with a config.json, or a name that transformers can resolve"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768], help="numbers of tokens")
    add_options(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device that the model would run on")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program; gives its exit code: 0 if some layer is linear, else 1."""
    arguments = parse_arguments(words)
    model = without_weights(read_config(arguments.model))
    try:
        backend = switch(model, arguments)
    except ValueError as error:
        if not never_asks(model):
            raise
        print(f"{type(model).__name__} is refused: {error}")
        return 1
    lines, is_linear = report(model, backend, arguments.lengths, arguments.device)
    print("\n".join(lines))
    return 0 if is_linear else 1


def report(model: Any, backend: str, lengths: Sequence[int], device: str) -> tuple[list[str], bool]:
    """Gives the lines to print for a switched model, and whether some layer is linear at one of the lengths."""
    import favor

    lengths = sorted(set(lengths))
    descriptions = [favor.describe(model, length, device=device) for length in lengths]
    described = [description.layers for description in descriptions]
    rows = [["layer", *(f"{length} tokens" for length in lengths)]]
    rows += [[of_layer[0].layer, *map(cell, of_layer)] for of_layer in zip(*described, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons: dict[tuple[str, str], list[int]] = {}
    for length, layers in zip(lengths, described, strict=True):
        for kind, why in dict.fromkeys((kind_of(layer), layer.why) for layer in layers if layer.why):
            reasons.setdefault((kind, why), []).append(length)
    lines += ["", FOOT]
    lines += [f"{kind} at {', '.join(map(str, at))}: {why}" for (kind, why), at in reasons.items()]
    lines += [f"note: {note}" for note in descriptions[-1].notes]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and positions < lengths[-1]:
        lines.append(f"the config has {positions} positions: the model was made for texts of at most that many tokens")
    counts = Counter(kind_of(layer) for layer in described[-1])
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no attention layers"
    lines.append(f"{type(model).__name__} with {backend} on {device}, {lengths[-1]} tokens: {total}")
    return lines, any(kind_of(layer) == "linear" for layers in described for layer in layers)


def kind_of(layer: Any) -> str:
    """Gives "linear" for a layer that runs any family of linear attention, else "exact", "local" or "refused"."""
    return layer.runs if layer.runs in KEPT else "linear"


def cell(layer: Any) -> str:
    """Says what a layer runs, and its cost if that differs from the cost of exact attention over all keys."""
    kind = kind_of(layer)
    return f"{kind}, speed {layer.speed:g}, memory {layer.memory:g}" if kind in ("linear", "local") else kind


def without_weights(config: Any) -> Any:
    """Builds the model of a config, with its head, on the meta device; raises ValueError if it has no class."""
    import torch

    kind = model_class(config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about computing initial weights on the meta device
        return kind._from_config(config).eval()


def add_options(parser: Any) -> None:
    """Adds the options of attention with which a model is checked or saved."""
    parser.add_argument(
        "--attn_implementation", help="backend; default: that of the model if it is one of favor, else landmark"
    )
    parser.add_argument("--num_features", type=int, help="random features or means per head; default: of the model")
    parser.add_argument("--selected_keys", type=int, help="keys that landmarks read exactly; default: of the model")
    parser.add_argument("--window", type=int, help="tokens of an exact block of features; default: of the model")
    parser.add_argument(
        "--exact_below", help="exact attention below this number of keys, or auto; default: that of the model"
    )


def switch(model: Any, arguments: Any) -> str:
    """Switches a model to the backend and options that a user chose; returns the backend's name."""
    import favor

    names = ("num_features", "selected_keys", "window", "exact_below")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if str(given.get("exact_below", "")).isdigit():
        given["exact_below"] = int(given["exact_below"])
    running = model.config._attn_implementation
    name = arguments.attn_implementation or (None if running in favor.BACKENDS else "landmark")
    favor.configure(model, name, **given)
    return name or running


def never_asks(model: Any) -> bool:
    """Tells whether no attention layer of a model asks transformers for a backend. Such a model cannot be switched."""
    from favor.integrations.loading import check_dispatch, never_dispatches

    try:
        check_dispatch(model, "landmark")
    except ValueError:
        return True
    return never_dispatches(type(model))


cli = program(NAME, main)
