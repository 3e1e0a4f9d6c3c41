"""Models without their weights, and the options of attention that programs of the command share."""

from __future__ import annotations

import warnings
from typing import Any

from favor_command.saved import model_class


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


def chosen_options(arguments: Any) -> dict[str, Any]:
    """Gives the options of `favor.FavorConfig` that a user gave."""
    names = ("num_features", "selected_keys", "window", "exact_below")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if str(given.get("exact_below", "")).isdigit():
        given["exact_below"] = int(given["exact_below"])
    return given


def switch(model: Any, arguments: Any) -> str:
    """Switches a model to the backend and options that a user chose; returns the backend's name."""
    import favor

    running = model.config._attn_implementation
    name = arguments.attn_implementation or (None if running in favor.BACKENDS else "landmark")
    favor.configure(model, name, **chosen_options(arguments))
    return name or running


def never_asks(model: Any) -> bool:
    """Tells whether no attention layer of a model asks transformers for a backend. Such a model cannot be switched."""
    from favor.integrations.loading import check_dispatch, never_dispatches

    try:
        check_dispatch(model, "landmark")
    except ValueError:
        return True
    return never_dispatches(type(model))
