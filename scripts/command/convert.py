"""Saves a copy of a model that runs linear attention whenever it is loaded.

    favor convert FOLDER OUT --attn_implementation landmark --num_features 128

The weights do not change. config.json gets the backend and its options, which `from_pretrained` reads after
`import favor`. No data is needed. The model is not trained for its new attention, so its quality may be lower:
measure it. `favor train distill` and `favor train mlm` train a model that needs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor_command import models
from favor_command.check import kind_of
from favor_command.program import Parser, check_new, program

NAME = "favor convert"
LONG = 2**24  # tokens; no text of this length is short enough for exact attention
PREPROCESSING = ("*token*", "*process*", "*vocab*", "*.model")
NONE = "no tokenizer or processor was found"


def parse_arguments(words: Sequence[str] | None) -> Any:
    """Arguments of the program; ends it for bad ones."""
    parser = Parser(NAME, __doc__)
    parser.add_place("model_name_or_path", "model", "folder of a saved model, or a name that transformers can resolve")
    parser.add_place("output_dir", "out", "new folder for the copy")
    models.add_options(parser)
    arguments = parser.parse_args(words)
    arguments.out = Path(arguments.out)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        words: the command line. Default None: that of this process.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: if there is no such model, it cannot be switched, or the folder already exists and is not empty.
    """
    arguments = parse_arguments(words)
    check_new(arguments.out)
    config = models.read_config(arguments.model)
    # Refuse a model that cannot be switched before any weights are read.
    switchable(models.without_weights(config), arguments)
    kind = models.model_class(config)
    model = kind.from_pretrained(models.location(arguments.model), trust_remote_code=False)
    before = model.config._attn_implementation
    backend = models.switch(model, arguments)
    linear, total = switchable(model)
    model.save_pretrained(arguments.out)
    saved = json.loads((arguments.out / models.CONFIG).read_text())
    beside = save_preprocessing(arguments.model, arguments.out)
    print(
        f"{arguments.model} ({before}) -> {arguments.out} ({backend}): {linear} of {total} attention layers are linear "
        "in long texts; the weights are the same\n"
        f"config.json: favor = {json.dumps(saved['favor'])}\n"
        f"beside the model: {beside}\n"
        f"load it: import favor; from transformers import {kind.__name__}\n"
        f'         {kind.__name__}.from_pretrained("{arguments.out}")'
    )
    return 0


def switchable(model: Any, arguments: Any = None) -> tuple[int, int]:
    """Counts the layers of a model that are linear in long texts, and all its layers.

    Args:
        model: on any device.
        arguments: options to switch the model with first. Default None: it is already switched.

    Raises:
        ValueError: if no layer is linear.
    """
    import favor

    if arguments is not None:
        models.switch(model, arguments)
    layers = favor.describe(model, LONG).layers
    linear = sum(kind_of(layer) == "linear" for layer in layers)
    if not linear:
        reasons = ", ".join(dict.fromkeys(f"{layer.runs} ({layer.why})" for layer in layers)) or "it has no attention"
        raise ValueError(f"no layer of {type(model).__name__} would be linear: {reasons}; nothing was saved")
    return linear, len(layers)


def save_preprocessing(model: str, out: Path) -> str:
    """Saves the tokenizer or processor of a model; returns the name of its class, or that none was found."""
    from transformers import AutoProcessor

    place = Path(models.location(model))
    # If a folder has no file of a tokenizer, transformers makes an empty one: do not save that.
    if place.is_dir() and not any(path for pattern in PREPROCESSING for path in place.glob(pattern)):
        return NONE
    try:
        found = AutoProcessor.from_pretrained(models.location(model), trust_remote_code=False)
    except (OSError, ValueError):
        return NONE
    found.save_pretrained(out)
    return type(found).__name__


cli = program(NAME, main)
