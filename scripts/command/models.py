"""Models by folder or name, without their weights where those are not needed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def location(model: str) -> str:
    """Gives a folder with the user's home written out, and a name of the hub as it is."""
    folder = Path(model).expanduser()
    return str(folder) if folder.exists() else model


def read_config(model: str) -> Any:
    """Reads the config of a saved model.

    Args:
        model: a folder, or a name of the hub that transformers can resolve.

    Raises:
        ValueError: if there is none.
    """
    from transformers import AutoConfig

    import favor  # noqa: F401  the models of the zoo

    folder = Path(model).expanduser()
    if folder.exists() and not (folder / CONFIG).is_file():
        what = f"holds no {CONFIG}" if folder.is_dir() else "is a file"
        raise ValueError(f"expected the folder of a saved model, got {model}, which {what}")
    try:
        return AutoConfig.from_pretrained(location(model), trust_remote_code=False)
    except OSError as error:
        if folder.exists():
            raise
        raise ValueError(
            f"expected a model, got {model!r}: there is no such folder here, and transformers finds none of that name "
            f"({str(error).splitlines()[0]})"
        ) from error


def without_weights(config: Any) -> Any:
    """Builds the model of a config on the meta device."""
    import torch
    from transformers import AutoModel

    # transformers goes through the list where a model has several base classes.
    config.architectures = getattr(config, "architectures", None) or []
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is computed there, such as initial weights
        return AutoModel.from_config(config, trust_remote_code=False).eval()


def model_class(config: Any) -> Any:
    """The class that a saved model was saved from, with its head; AutoModel if its config names none."""
    import transformers

    import favor.models

    name = (getattr(config, "architectures", None) or [""])[0]
    places = [transformers, *(getattr(favor.models, part) for part in favor.models.__all__)]
    found = next((getattr(place, name) for place in places if name and hasattr(place, name)), None)
    return found or transformers.AutoModel


def add_options(parser: Any) -> None:
    """Adds the options of attention that a model is looked at, or saved, with."""
    parser.add_argument(
        "--attn_implementation", help="backend; default: that of the model if it is one of favor, else landmark"
    )
    parser.add_argument(
        "--num_features", type=int, help="random features or landmarks per head; default: that of the model"
    )
    parser.add_argument(
        "--window", type=int, help="length of exact blocks beside the estimate; default: that of the model"
    )
    parser.add_argument("--exact_below", help="exact attention below so many keys, or auto; default: that of the model")


def chosen_options(arguments: Any) -> dict[str, Any]:
    """The options of `favor.FavorConfig` that a user gave."""
    names = ("num_features", "window", "exact_below")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if str(given.get("exact_below", "")).isdigit():
        given["exact_below"] = int(given["exact_below"])
    return given


def switch(model: Any, arguments: Any) -> str:
    """Switches a model to the backend that was asked for; returns its name."""
    import favor

    running = model.config._attn_implementation
    name = arguments.attn_implementation or (None if running in favor.BACKENDS else "landmark")
    favor.configure(model, name, **chosen_options(arguments))
    return name or running


def never_asks(model: Any) -> bool:
    """Tells whether no attention layer of a model asks transformers for a backend, so that none can be switched."""
    from favor.integrations.loading import check_dispatch, never_dispatches

    try:
        check_dispatch(model, "landmark")
    except ValueError:
        return True
    return never_dispatches(type(model))
