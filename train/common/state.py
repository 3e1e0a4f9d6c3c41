"""The state of a training in files that hold no code: tensors as safetensors, all else as JSON.

A state is a tree of dictionaries, lists and tuples with numbers, texts and tensors as leaves, such as the `state_dict`
of models, optimizers and schedulers. `write` writes it into two files, `NAME.json` and `NAME.safetensors`. To read them
can fail, but cannot run any code, whoever wrote them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

PLAIN = (bool, int, float, str)


class DamagedError(ValueError):
    """Says why a file of a checkpoint cannot be used."""


def write(folder: Path, name: str, tree: Any) -> None:
    """Writes a state as `name.json` and `name.safetensors` into a folder.

    Raises TypeError if it holds something that is neither a container nor a number, text or tensor.
    """
    tensors: dict[str, Tensor] = {}
    plan = _encode(tree, name, tensors, {})
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(plan) + "\n", encoding="utf-8")


def read(folder: Path, name: str) -> Any:
    """Reads a state that `write` wrote, on the CPU; raises DamagedError, which names the file, if it cannot."""
    path = folder / f"{name}.safetensors"
    try:
        tensors = load_file(path)
        path = folder / f"{name}.json"
        return _decode(json.loads(path.read_text(encoding="utf-8")), tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = str(error) if isinstance(error, SafetensorError) else f"{type(error).__name__}: {error}"
        raise DamagedError(f"{path.name} cannot be read ({said})") from error


def _encode(value: Any, path: str, tensors: dict[str, Tensor], known: dict[Any, str]) -> Any:
    """Turns a value into one that JSON can hold; puts its tensors into `tensors`, each once."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        # Tied weights are one tensor under several names.
        own = value.detach()
        identity = (own.data_ptr() or id(value), own.shape, own.stride(), own.dtype, own.device)
        if identity not in known:
            known[identity] = path if path not in tensors else f"{path}#{len(tensors)}"
            own = own.cpu().contiguous()
            # A file cannot hold a view: copy the view's own elements.
            tensors[known[identity]] = own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
        return {"tensor": known[identity]}
    if isinstance(value, dict):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError(f"{path}: keys must be texts or whole numbers, got {list(value)[:5]}")
        return {"dict": [[key, _encode(part, f"{path}.{key}", tensors, known)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        parts = [_encode(part, f"{path}.{number}", tensors, known) for number, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    raise TypeError(f"{path}: a checkpoint holds numbers, texts, tensors and containers of them, got {type(value)}")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(part, tensors) for part in content)
    if kind != "dict":
        raise ValueError(f"expected dict, tuple or tensor, got {kind!r}")
    return {key: _decode(part, tensors) for key, part in content}


def random_state() -> dict[str, Any]:
    """Gives the states of this process's random number generators: Python's, NumPy's and PyTorch's."""
    own: dict[str, Any] = dict(np.random.get_state(legacy=False))
    own["state"] = {"key": own["state"]["key"].tolist(), "pos": own["state"]["pos"]}
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": own, "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets the random number generators to the states that `random_state` gave."""
    random.setstate(state["python"])
    words = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": words}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
