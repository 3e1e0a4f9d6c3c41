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

from favor_command.check import add_options, kind_of, switch, without_weights
from favor_command.program import Parser, check_new, program
from favor_command.saved import CONFIG, load_model, load_processor, model_class, read_config

NAME = "favor convert"
LONG = 2**24  # tokens; no text of this length is short enough for exact attention


def parse_arguments(words: Sequence[str] | None) -> Any:
    """Arguments of the program; ends it for bad ones."""
    parser = Parser(NAME, __doc__)
    parser.add_place("model_name_or_path", "model", "folder of a saved model, or a name that transformers can resolve")
    parser.add_place("output_dir", "out", "new folder for the copy")
    add_options(parser)
    arguments = parser.parse_args(words)
    arguments.out = Path(arguments.out)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Runs the program; gives its exit code, 0."""
    arguments = parse_arguments(words)
    check_new(arguments.out)
    config = read_config(arguments.model)
    kind = model_class(config)
    # Refuse a model that cannot be switched before any weights are read.
    empty = without_weights(config)
    switch(empty, arguments)
    switchable(empty)
    model = load_model(kind, arguments.model)
    before = model.config._attn_implementation
    backend = switch(model, arguments)
    linear, total = switchable(model)
    model.save_pretrained(arguments.out)
    saved = json.loads((arguments.out / CONFIG).read_text())
    beside = save_preprocessing(arguments.model, arguments.out)
    package = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__.rpartition(".")[0]
    print(
        f"{arguments.model} ({before}) -> {arguments.out} ({backend}): {linear} of {total} attention layers are linear "
        "in long texts; the weights are the same\n"
        f"config.json: favor = {json.dumps(saved['favor'])}\n"
        f"beside the model: {beside}\n"
        f"load it: import favor; from {package} import {kind.__name__}\n"
        f'         {kind.__name__}.from_pretrained("{arguments.out}")'
    )
    return 0


def switchable(model: Any) -> tuple[int, int]:
    """Counts the layers of a switched model that are linear in long texts, and all; raises ValueError if none is."""
    import favor

    layers = favor.describe(model, LONG).layers
    linear = sum(kind_of(layer) == "linear" for layer in layers)
    if not linear:
        reasons = ", ".join(dict.fromkeys(f"{layer.runs} ({layer.why})" for layer in layers)) or "it has no attention"
        raise ValueError(f"no layer of {type(model).__name__} would be linear: {reasons}; nothing was saved")
    return linear, len(layers)


def save_preprocessing(model: str, out: Path) -> str:
    """Saves the tokenizer or processor of a model; returns the name of its class, or why there is none."""
    from transformers import AutoFeatureExtractor, AutoProcessor

    said: list[str] = []
    for kind in (AutoProcessor, AutoFeatureExtractor):  # a model that hears may have no tokenizer
        try:
            found = load_processor(model, kind)
        except ValueError as error:
            said = said or [f"no tokenizer or processor was found: {error}"]
            continue
        found.save_pretrained(out)
        said.insert(0, type(found).__name__)
        break
    return "; ".join(said)


cli = program(NAME, main)
