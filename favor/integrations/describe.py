"""`favor.describe`: what each attention layer of a model runs at a length, and what that costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from inspect import unwrap
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from favor import registry
from favor.config import FavorConfig, feature_family
from favor.integrations.layer import ALL_EXACT, all_exact, decodes, layer_options, stored_choice
from favor.integrations.masks import REFUSED, causal_of
from favor.integrations.modules import asking_layers, attention_names, silent_layers
from favor.integrations.positions import gives_tables

# Refused arguments for which a layer that names one has a value. Layers mostly pass the others on as None.
_TELLING = ("position_bias", "softcap", "s_aux", "indices")
_BARE = (
    "landmarks without selected keys break speech encoders that were trained with exact attention (the word error rate "
    "of a Whisper becomes 99 %): leave selected_keys at its default. It concerns "
)
_COMPILED = (
    "the model is compiled, so the length of a batch, padding included, is compared with exact_below, and a text can "
    "get another result in another batch: set exact_below=0."
)
_FOOT = "speed, memory: of attention alone, estimated, exact attention over all keys is 1; higher speed is better"
_COLUMNS = ("layer", "runs", "why", "num_features", "window", "parameters", "speed", "memory")


@dataclass(frozen=True)
class LayerDescription:
    """One attention layer and what it runs.

    Attributes:
        layer: name of its module in the model.
        runs: family of the linear attention; "exact", "local" (exact within the sliding window of the model), or
            "refused".
        why: the reason if this is not linear attention; for linear attention, its selected keys and exact heads, if
            any.
        num_features: M, None where it is not read: exact attention, and causal landmarks.
        window: length of exact blocks, 0 without a window; the sliding window of a local layer; None for exact
            attention.
        parameters: "calibrated", "corrected", "of each sequence", "none", or that a causal layer takes those of favor+.
        speed: of a forward and a backward pass compared with exact attention over all keys; above 1 is faster.
            Estimated from the measured lengths at which the two take equally long, see `favor.registry.Family`.
        memory: numbers that attention holds per head compared with the L x L weights of exact attention; below 1 is
            less. Exact attention of PyTorch does not always hold them all.
        selected_keys: keys that each block of queries attends to exactly, None where nothing is estimated. The table
            has them under `why`.
    """

    layer: str
    runs: str
    why: str = ""
    num_features: int | None = None
    window: int | None = None
    parameters: str = "none"
    speed: float = 1.0
    memory: float = 1.0
    selected_keys: int | None = None


@dataclass(frozen=True)
class ModelDescription:
    """Layers of a model and what they run at a length; printed as a table.

    Attributes:
        model: name of its class.
        length: number of tokens.
        device: kind of device, as in `torch.device.type`.
        layers: one entry per layer, in the order of the modules.
        notes: what should be changed, and why; the table ends with them.
    """

    model: str
    length: int
    device: str
    layers: tuple[LayerDescription, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Gives all of it as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [_COLUMNS, *(tuple(_cell(getattr(layer, name)) for name in _COLUMNS) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        counts = Counter(layer.runs for layer in self.layers)
        summary = ", ".join(f"{count} {runs}" for runs, count in counts.items()) or "no attention layers"
        head = f"{self.model}, {self.length} tokens on {self.device}: {summary}"
        return "\n".join([head, *lines, _FOOT, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


def describe(model: PreTrainedModel, length: int = 8192, *, device: str | None = None) -> ModelDescription:
    """Says what each attention layer of a model runs at a length, and why.

    Nothing is run: the answer is read from the configs and the classes of the layers. What a model decides only when it
    runs (a mask that a user passes, a prefix) is not seen here; if it is not supported, the layers then raise an error.

    Args:
        model: any transformers model, or one of peft around it.
        length: number of tokens, in all parts of the model. In a batch each row is described by its own tokens, without
            its padding, except in a compiled model.
        device: kind of device on which the model will run, as in `torch.device.type`. Default None: that of its
            parameters.

    Returns:
        a `ModelDescription`: `print` shows a table, `.layers` and `.to_dict()` are data.

    Raises:
        TypeError: if it is not a transformers model. ValueError: if the length is below 1.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> import favor
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = favor.configure(BertModel(tiny), "landmark", num_features=64)
        >>> [layer.runs for layer in favor.describe(model, length=8192).layers]
        ['landmark']
        >>> favor.describe(model, length=100).layers[0].why
        'fewer keys than exact_below = 2560'
    """
    inner: Any = getattr(model, "get_base_model", None)  # of peft
    model = model if inner is None else inner()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"favor.describe takes a model of transformers, got {type(model).__name__}.")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}.")
    attention = attention_names(model)
    asking, silent = asking_layers(attention), silent_layers(attention)
    layers = []
    for name, module in attention.items():
        if name in asking:
            layers.append(_describe_layer(name, module, length, device))
        elif name in silent:
            layers.append(LayerDescription(name, "exact", f"{type(module).__name__} never asks for a backend"))
    notes = []
    bare = [layer.layer for layer in layers if layer.selected_keys == 0 and _is_bare(model, layer)]
    if bare:
        notes.append(f"{_BARE}{bare[0]}{f' and {len(bare) - 1} more layers' if bare[1:] else ''}.")
    options = getattr(model.config, "favor", None) or {}
    if getattr(model, "_compiled_call_impl", None) and options.get("exact_below", 1):
        notes.append(_COMPILED)
    return ModelDescription(type(model).__name__, length, device or model.device.type, tuple(layers), tuple(notes))


def _is_bare(model: PreTrainedModel, layer: LayerDescription) -> bool:
    """Tells whether a layer estimates the attention of an audio encoder by a family that could select keys.

    The smallest model around the layer must hear audio and read no text, as transformers says of the class.
    """
    if not registry.FAMILIES[layer.runs].selects_keys or getattr(model.get_submodule(layer.layer), "is_causal", False):
        return False
    names = layer.layer.split(".")
    around = (model.get_submodule(".".join(names[:depth])) for depth in reversed(range(len(names))))
    smallest = next(part for part in around if isinstance(part, PreTrainedModel))
    return smallest.input_modalities in ("audio", ("audio",), ["audio"])


def _describe_layer(name: str, module: nn.Module, length: int, device: str | None) -> LayerDescription:
    config: Any = module.config
    backend = config._attn_implementation
    own, given = layer_options(module, str(backend))
    if own is None:
        why = "another part was switched" if backend in registry.BACKENDS else f"the backend is {backend}"
        return LayerDescription(name, "exact", why)
    refused = next((REFUSED[argument] for argument in _TELLING if _passes(module, argument)), None)
    if refused is not None:
        return LayerDescription(name, "refused", refused)
    sliding = _sliding_window(module)
    is_causal = hasattr(module, "is_causal") and causal_of(module, None)
    if sliding is not None:
        seen = min(sliding if is_causal else 2 * sliding, length) / length
        local: dict[str, Any] = {"window": sliding, "speed": _round(1 / seen), "memory": _round(seen)}
        return LayerDescription(name, "local", "exact within its sliding window", **local)
    options = FavorConfig.from_dict(given)
    family_name, _ = feature_family(own, options)
    family, device = registry.FAMILIES[family_name], device or next(iter(module.parameters())).device.type
    threshold = options.exact_threshold(device, is_causal, family_name)
    if length < threshold:
        return LayerDescription(name, "exact", f"fewer keys than exact_below = {threshold}")
    choice = stored_choice(module)
    parameters, problem = _parameters(options, family, choice, is_causal or decodes(module))
    if problem:
        return LayerDescription(name, "refused", problem)
    if all_exact(choice):
        return LayerDescription(name, "exact", ALL_EXACT)
    has_window = family.supports_window and (is_causal or not decodes(module))
    window = choice.get("window", options.window) if has_window else 0
    heads, selected = list(choice.get("exact_heads", ())), options.selected(family_name, is_causal)
    estimated = 1 - len(heads) / choice["key_heads"] if heads and "key_heads" in choice else 1.0
    equal = replace(options, exact_below="auto").exact_threshold(device, is_causal, family_name)
    number = None if family.selects_keys and is_causal else options.num_features  # they have one mean for 256 keys
    held = estimated * min(1.0, ((number or 0) + window + selected) / length) + (1 - estimated)
    reasons = [f"{selected} selected keys"] if selected else []
    reasons += [f"key heads {', '.join(map(str, heads))} are exact"] if heads else []
    costs = {"speed": _round(1 / (estimated * equal / length + (1 - estimated))), "memory": _round(held)}
    why = "; ".join(reasons)
    return LayerDescription(name, family_name, why, number, window, parameters, **costs, selected_keys=selected)


def _parameters(options: FavorConfig, family: Any, choice: dict[str, Any], is_decoder: bool) -> tuple[str, str]:
    if not family.takes_parameters or not (family.needs_statistics or choice.get("family") == family.name):
        return "none", ""
    if options.statistics == "batch":
        return ("those of favor+, as causal layers fit none" if is_decoder else "of each sequence"), ""
    if (choice.get("family"), choice.get("kind")) != (family.name, options.statistics):
        return "", f'statistics="{options.statistics}" needs stored parameters of {family.name}'
    return options.statistics, ""


def _sliding_window(module: nn.Module) -> int | None:
    """Gives the keys on one side of a query that a layer sees, its own one counted; None if it sees all.

    A layer whose code never mentions its window has none, whatever its config says.
    """
    config: Any = module.config
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[number] if kinds and isinstance(number, int) and number < len(kinds) else None
    if kind == "chunked_attention":
        return config.attention_chunk_size
    if kind == "full_attention" or not _mentions(module, "sliding_window"):
        return None
    own = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return own if isinstance(own, int) else None


def _passes(module: nn.Module, argument: str) -> bool:
    """Tells whether a layer passes an argument of attention that FAVOR refuses."""
    config: Any = module.config
    if not _mentions(module, argument):
        return False
    if argument == "position_bias":
        return not gives_tables(module)
    if argument == "softcap":
        return getattr(config, "attn_logit_softcapping", None) is not None
    return True


def _mentions(module: nn.Module, word: str) -> bool:
    code = unwrap(type(module).forward).__code__
    words = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    words |= {name for constant in code.co_consts if isinstance(constant, tuple) for name in constant}
    return word in words


def _round(value: float) -> float:
    return float(f"{value:.2g}")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
