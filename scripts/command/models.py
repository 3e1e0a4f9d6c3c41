"""Models by folder or name, without their weights where the weights are not needed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def location(model: str) -> str:
    """Gives the path of a folder with ~ replaced by the user's home; a name of the hub is returned unchanged."""
    folder = Path(model).expanduser()
    return str(folder) if folder.exists() else model


def read_config(model: str) -> Any:
    """Reads the config of a saved model.

    Args:
        model: a folder, or a name of the hub that transformers can resolve.

    Raises:
        ValueError: if there is no such model.
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

    # transformers iterates over this list for models with several base classes, and fails if it is None.
    config.architectures = getattr(config, "architectures", None) or []
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about computing initial weights on the meta device
        return AutoModel.from_config(config, trust_remote_code=False).eval()


def model_class(config: Any) -> Any:
    """Finds the class of a saved model, with its head; AutoModel if its config names no class."""
    import transformers

    import favor.models

    name = (getattr(config, "architectures", None) or [""])[0]
    places = [transformers, *(getattr(favor.models, part) for part in favor.models.__all__)]
    found = next((getattr(place, name) for place in places if name and hasattr(place, name)), None)
    return found or transformers.AutoModel


def add_options(parser: Any) -> None:
    """Adds the options of attention with which a model is checked or saved."""
    parser.add_argument(
        "--attn_implementation", help="backend; default: that of the model if it is one of favor, else landmark"
    )
    parser.add_argument(
        "--num_features", type=int, help="random features or landmarks per head; default: that of the model"
    )
    parser.add_argument(
        "--window", type=int, help="tokens of a block in which attention is exact; default: that of the model"
    )
    parser.add_argument(
        "--exact_below", help="exact attention below this number of keys, or auto; default: that of the model"
    )


def chosen_options(arguments: Any) -> dict[str, Any]:
    """Gives the options of `favor.FavorConfig` that a user gave."""
    names = ("num_features", "window", "exact_below")
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
