"""Runs one model class three ways: exactly, with a landmark for every key, and with few landmarks.

Landmarks with a group for every key are softmax attention. With a window they run the kernels of blocks and groups
even then; without one, causal attention over so few tokens has nothing to estimate.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor.eval.compatibility.classes import Candidate
from favor.eval.compatibility.exceptions import OWN
from favor.eval.compatibility.inputs import Inputs, all_inputs, padded
from favor.eval.compatibility.tiny import shrink
from favor.integrations import backend as backend_module

BACKEND = "favor#"
MANY, FEW, SHORT = 2048, 4, 4  # groups, groups, tokens of a window
TOLERANCE = 1e-4
MOST_PARAMETERS, MOST_INPUTS = 60_000_000, 40
SIZES = ((8, 4), (8, None), (16, 4), (4, 4), (1, 4), (1, None))  # factor of widths, patches of a side
WAYS = {"groups of one key": (MANY, 0), "in blocks": (MANY, SHORT)}
CATEGORIES = ("equal", "local", "refused", "no attention", "not built", "silently exact", "wrong", "crash")
BAD = ("silently exact", "wrong", "crash")


class NotBuiltError(Exception):
    """No tiny model of a class could be made, or nothing that it takes as input was found."""


def check(candidate: Candidate) -> dict[str, Any]:
    """Gives category, reason and numbers of one class; the category is one of `CATEGORIES`."""
    result: dict[str, Any] = {"family": candidate.family, "class": candidate.name, "dispatches": candidate.dispatches}
    try:
        exact, inputs = build(candidate)
    except NotBuiltError as error:
        return {**result, "category": "not built", "reason": str(error)}
    try:
        model = switched(exact)
    except Exception as error:
        return {**result, **_raised(error, "loading")}
    try:
        return {**result, **_compared(exact, model, inputs)}
    except Exception as error:
        return {**result, **_raised(error, "forward")}


def build(candidate: Candidate) -> tuple[PreTrainedModel, Inputs]:
    """Makes a tiny model with exact attention, and inputs that it takes.

    Raises:
        NotBuiltError: if no try succeeds, with the last reason.
    """
    model_class = candidate.load()
    own = {**OWN.get(candidate.family, {}), **OWN.get(candidate.name, {})}
    problems = []
    for factor, image in SIZES:
        try:
            config = shrink(model_class.config_class(), factor, image, own)
            size = _parameters(model_class, copy.deepcopy(config))
            if size > MOST_PARAMETERS:
                raise NotBuiltError(f"{size / 1e6:.0f} million parameters")
            model = _made(model_class, config, "eager")
        except Exception as error:
            problems.append(_short(error))
            continue
        number = 0
        for number, inputs in enumerate(all_inputs(model, model.config), 1):
            try:
                if run(model, inputs):
                    return model, inputs
            except Exception as error:
                problems.append(_short(error))
            if number == MOST_INPUTS:
                break
        if not number:
            needed = inspect.signature(model.forward).parameters
            problems.append(f"no inputs known for {', '.join(needed)}")
    raise NotBuiltError(" / ".join(dict.fromkeys(problems[:2] + problems[-1:])))


def _parameters(model_class: type[PreTrainedModel], config: Any) -> int:
    """Numbers in a model, before it is made; 0 where that cannot be told."""
    try:
        with torch.device("meta"):
            model = _from_config(model_class, config, "eager")
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _made(model_class: type[PreTrainedModel], config: Any, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = _from_config(model_class, config, attention)
    _sharpen(model)
    return model


def _from_config(model_class: type[PreTrainedModel], config: Any, attention: str) -> PreTrainedModel:
    """A model as a user loads it, by class, config and name of the backend; experts in plain torch, of any width."""
    model: PreTrainedModel = model_class._from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    return model.eval().float()


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Draws weights so large that attention matters: at the usual 0.02 tiny models attend to all keys alike."""
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            parameter.normal_(0, 1.0 if "embed" in name and parameter.ndim == 2 else max(fan_in, 1) ** -0.5)
        elif not parameter.isfinite().all() or parameter.abs().max() > 100:
            parameter.normal_(0, 0.1)


def switched(exact: PreTrainedModel, attention: str = BACKEND) -> PreTrainedModel:
    """Makes a model of the same config and weights with another attention."""
    torch.manual_seed(0)
    model = _from_config(type(exact), copy.deepcopy(exact.config), attention)
    with torch.no_grad():
        for own, other in zip(_tensors(model), _tensors(exact), strict=True):
            own.copy_(other)
    return model


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def configure(model: nn.Module, num_features: int, window: int) -> None:
    """Sets options in every config of a model."""
    options = {"features": "landmark", "num_features": num_features, "window": window, "exact_below": 0}
    for module in model.modules():
        if hasattr(module, "config"):
            with contextlib.suppress(Exception):
                module.config.favor = options


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Gives the outputs of a model that are numbers, by name."""
    torch.manual_seed(1)
    more = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return dict(_numbers("", model(**inputs, **more)))


def _numbers(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield path, value.detach().float()
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("past_key_values", "attentions", "cache_params", "router_logits"):
                yield from _numbers(f"{path}.{key}", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _numbers(f"{path}.{number}", part)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor | None = None) -> float:
    """Largest relative error of an output, of real tokens if there is a mask `[B, L]`."""
    errors = [0.0]
    if mask is not None:  # what is pooled may come from a padded token
        rows = {name: value for name, value in expected.items() if value.shape[:2] == mask.shape}
        found, expected = ({n: own[n][mask.bool()] for n in rows} if rows else own for own in (found, expected))
    for name, right in expected.items():
        left = found[name]
        left, right = (torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in (left, right))
        norm = right.norm().item()
        if norm > 0:
            errors.append((left - right).norm().item() / norm)
    return max(errors)


class Watch:
    """Counts calls of the backend and of the estimator, and finds attention modules that call neither."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []  # class of the module, and whether attention was estimated
        self.silent: set[str] = set()
        self._stack: list[list[bool]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        original, estimator = ALL_ATTENTION_FUNCTIONS[BACKEND], backend_module.favor_attention

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls.append((type(module).__name__, False))
            for flag in self._stack:
                flag[0] = True
            return original(module, *args, **kwargs)

        def estimate(*args: Any, **kwargs: Any) -> Any:
            if self.calls:
                self.calls[-1] = (self.calls[-1][0], True)
            return estimator(*args, **kwargs)

        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        AttentionInterface.register(BACKEND, attention)
        backend_module.favor_attention = estimate
        try:
            yield
        finally:
            AttentionInterface.register(BACKEND, original)
            backend_module.favor_attention = estimator
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if "Attention" in type(module).__name__:
            self._stack.append([False])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if "Attention" in type(module).__name__ and not self._stack.pop()[0]:
            inner = any("Attention" in type(m).__name__ for m in module.modules() if m is not module)
            if not inner:
                self.silent.add(type(module).__name__)


def _compared(exact: PreTrainedModel, model: PreTrainedModel, inputs: Inputs) -> dict[str, Any]:
    watch = Watch()
    expected, errors = run(exact, inputs), {}
    batches: dict[str, tuple[Inputs, Tensor | None]] = {"whole": (inputs, None)}
    for side in ("right", "left"):
        with contextlib.suppress(Exception):
            batch = padded(inputs, side)
            if batch is not None and run(exact, batch):
                batches[side] = (batch, batch["attention_mask"])
    configure(model, FEW, SHORT)
    with watch():
        change = distance(run(model, inputs), expected)
    estimated = sum(own for _, own in watch.calls)
    result: dict[str, Any] = {
        "calls": len(watch.calls),
        "estimated": estimated,
        "silent": sorted(watch.silent),
        "few": change,
        "errors": errors,
    }
    if not watch.calls:
        category = "silently exact" if watch.silent else "no attention"
        return {**result, "category": category, "reason": ", ".join(sorted(watch.silent)) + " never calls a backend"}
    worst, sdpa = 0.0, None
    for way, (number, window) in WAYS.items():
        configure(model, number, window)
        for name, (batch, mask) in batches.items():
            reference = run(exact, batch)
            error = distance(run(model, batch), reference, mask)
            errors[f"{way}, {name}"] = error
            worst = max(worst, error)
            if not error < TOLERANCE:
                with contextlib.suppress(Exception):
                    sdpa = sdpa or switched(exact, "sdpa")
                    errors[f"sdpa to eager, {name}"] = distance(run(sdpa, batch), reference, mask)
    result["worst"] = worst
    if not worst < TOLERANCE:
        return {**result, "category": "wrong", "reason": f"relative error {worst:.1e}"}
    if not estimated:
        sliding = "local" if change < TOLERANCE else "wrong"
        return {**result, "category": sliding, "reason": "no layer estimates attention"}
    reason = "hardly depends on attention" if change < TOLERANCE else ""
    return {**result, "category": "equal", "reason": reason}


def _raised(error: Exception, where: str) -> dict[str, Any]:
    """A refusal is a ValueError or NotImplementedError of favor's own; all else is a crash."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = "/favor/" in frame.filename or "favor" in str(error)
    refused = isinstance(error, ValueError | NotImplementedError) and ours
    reason = _short(error) if refused else f"{_short(error)} @{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return {"category": "refused" if refused else "crash", "reason": reason, "raised": where}


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"[:300]
