"""The attention modules of any model, which ask for a backend or stand in a decoder; configs and modes of its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from types import MethodType
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel

_MARK = "wrapped_by_favor"  # other libraries wrap the same methods


def attention_names(model: nn.Module) -> dict[str, nn.Module]:
    """Lists the modules of a model that may be attention layers, by their names in it."""
    return {name: m for name, m in model.named_modules() if is_attention(type(m)) or hasattr(m, "is_causal")}


def asking_layers(attention: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Gives those of the attention layers that ask for a backend. Each class is inspected once."""
    asks = {kind: dispatches(module) for kind, module in {type(m): m for m in attention.values()}.items()}
    return {name: module for name, module in attention.items() if asks[type(module)]}


def silent_layers(attention: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Gives those of the attention layers that never ask for a backend, and neither hold nor are in one that does."""
    inside = {part for module in asking_layers(attention).values() for part in module.modules()}
    return {
        name: module
        for name, module in attention.items()
        if is_attention(type(module)) and module not in inside and inside.isdisjoint(module.modules())
    }


def in_decoders(attention: Mapping[str, nn.Module]) -> set[str]:
    """Names the layers whose nearest other attention is causal, such as the cross attention of a decoder layer."""
    inside: dict[str, list[str]] = defaultdict(list)  # names of attention layers, by the part of the model around them
    for name in attention:
        for part in _parts_around(name):
            inside[part].append(name)
    found = set()
    for name in attention:
        beside = ([other for other in inside[part] if _are_apart(name, other)] for part in _parts_around(name))
        if any(getattr(attention[other], "is_causal", False) for other in next(filter(None, beside), ())):
            found.add(name)
    return found


def _parts_around(name: str) -> list[str]:
    """Names the parts of a model that hold a module, the smallest first and "" for all of it last."""
    path = name.split(".")
    return [".".join(path[:depth]) for depth in reversed(range(len(path)))]


def _are_apart(name: str, other: str) -> bool:
    """Tells whether a module neither holds another one nor is in it."""
    return not f"{name}.".startswith(f"{other}.") and not other.startswith(f"{name}.")


def configs_of(model: nn.Module) -> list[Any]:
    """Lists the configs of a model and its parts, each once."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def private_configs(model: nn.Module) -> list[Any]:
    """Lists configs of attention layers that belong to no model, such as copies: transformers never switches them."""
    owned = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    found = (getattr(module, "config", None) for module in attention_names(model).values())
    return [config for config in found if config is not None and id(config) not in owned]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs a model in evaluation mode, and gives each of its modules its own mode back, also after an error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def is_attention(value: Any) -> bool:
    """Tells whether something is a class of attention modules, by its name."""
    return isinstance(value, type) and issubclass(value, nn.Module) and "Attention" in value.__name__


def dispatches(module: nn.Module) -> bool:
    """Tells whether an attention module asks transformers for the function of its backend."""
    for base in type(module).__mro__:
        for function in map(unwrap, filter(callable, vars(base).values())):
            code = getattr(function, "__code__", None)
            space = getattr(function, "__globals__", {})
            names = () if code is None else code.co_names
            # A lookup with getattr never finds a FAVOR backend: such layers are always eager.
            asks = "get_interface" in names or "getattr" not in names
            if asks and any(isinstance(space.get(name), AttentionInterface) for name in names):
                return True
    return False


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts a function around a method, class method or function of a module, once in a process.

    It is called with the method as it was, and with the arguments, the object or class first.
    """
    bound = getattr(owner, name)
    if is_wrapped(bound):
        return
    is_class_method = isinstance(bound, MethodType)
    original: Callable[..., Any] = bound.__func__ if is_class_method else bound

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(method, _MARK, True)
    setattr(owner, name, classmethod(method) if is_class_method else method)


def is_wrapped(function: Any) -> bool:
    """Tells whether `wrap_once` has put a function around this one."""
    return hasattr(function, _MARK)
