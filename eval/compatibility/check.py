"""Runs one model class in three ways: exactly, with landmarks that lose nothing, and with few random features.

Landmarks are softmax attention if every key is a mean of its own, or if a block of queries reads all keys. Causal
landmarks have nothing to estimate over so few tokens, but random features have.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import math
import resource
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import favor
from favor.eval.compatibility.tiny import OWN, Inputs, all_inputs, padded, shrink, with_types
from favor.integrations import backend as backend_module
from favor.integrations.cache import StreamLayer

BACKEND = "favor#"
PROMPT = 16  # tokens before those that are generated one by one
FEW = {"num_features": 4}
TOLERANCE = 1e-4
MOST_PARAMETERS, MOST_INPUTS = 60_000_000, 30
SIZES = ((8, 4), (8, None), (16, 4), (4, 4), (1, 4), (1, None))  # divisor of widths, patches per side of an image
WAYS: dict[str, dict[str, Any]] = {
    "means of one key": {"features": "landmark", "num_features": 2048, "selected_keys": 0},
    "in blocks": {"features": "landmark", "num_features": 4, "selected_keys": 2048},
}
CATEGORIES = ("equal", "local", "refused", "no attention", "not built", "silently exact", "wrong", "crash")
Batches = dict[str, tuple[Inputs, Tensor | None]]  # with the mask of the real tokens, if some are padding
BAD = ("silently exact", "wrong", "crash")


@dataclass(frozen=True)
class Candidate:
    """A model class that may run with a backend."""

    family: str
    module: str
    name: str


class NotBuiltError(Exception):
    """No tiny model of a class could be made, or no inputs were found that it takes."""


def timed_check(candidate: Candidate, seconds: int) -> dict[str, Any]:
    """Checks a class in a process of its own, which ends after so many seconds of processor time; adds its seconds."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    start = time.process_time()
    end = math.ceil(start) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 5))
    return {**check(candidate), "seconds": round(time.process_time() - start, 1)}


def check(candidate: Candidate) -> dict[str, Any]:
    """Gives category, reason and numbers of one class; the category is one of `CATEGORIES`."""
    result: dict[str, Any] = {"family": candidate.family, "class": candidate.name}
    try:
        exact, inputs = build(candidate)
    except NotBuiltError as error:
        return {**result, "category": "not built", "reason": str(error)}
    batches = _batches(exact, inputs)
    sdpa = None
    with contextlib.suppress(Exception):  # not all models take it
        sdpa = switched(exact, "sdpa")
    if sdpa is not None and (apart := _apart(exact, sdpa, batches)):
        result["sdpa_and_eager_differ"] = apart
    try:
        model = switched(exact)
    except Exception as error:
        return {**result, **_raised(error, "loading")}
    try:
        result |= _compared(exact, sdpa, model, batches)
    except Exception as error:
        return {**result, **_raised(error, "forward")}
    if candidate.name.endswith("ForCausalLM") and result["category"] in ("equal", "local"):
        configure(model, WAYS["in blocks"])
        result["cache"] = generation(exact, model, inputs)
        if result["cache"].startswith(("wrong", "crash")):
            result |= {"category": result["cache"].split(":")[0], "reason": f"FavorCache: {result['cache']}"}
    return result


def build(candidate: Candidate) -> tuple[PreTrainedModel, Inputs]:
    """Makes a tiny model with exact attention, and inputs that it takes."""
    model_class = getattr(importlib.import_module(candidate.module), candidate.name)
    own = {**OWN.get(candidate.family, {}), **OWN.get(candidate.name, {})}
    problems, tried = [], 0
    for factor, image in SIZES:
        try:
            config = shrink(model_class.config_class(), factor, image, own)
            size = _parameters(model_class, copy.deepcopy(config))
            if size > MOST_PARAMETERS:
                raise NotBuiltError(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = _from_config(model_class, config, "eager")
            _sharpen(model)
        except Exception as error:
            problems.append(_short(error))
            continue
        found = list(islice(all_inputs(model, model.config), MOST_INPUTS))
        for inputs in found:
            try:
                if run(model, inputs):
                    return model, inputs
            except Exception as error:
                problems.append(_short(error))
        if not found:
            problems.append(f"no inputs known for {', '.join(inspect.signature(model.forward).parameters)}")
        tried += 1
        if not found or tried == 5:
            break
    raise NotBuiltError(" / ".join(dict.fromkeys(problems[:2] + problems[-1:])))


def _parameters(model_class: type[PreTrainedModel], config: Any) -> int:
    """Counts the parameters of a model before it is made; 0 if they cannot be counted."""
    try:
        with torch.device("meta"):
            model = _from_config(model_class, config, "eager")
    except Exception:
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def _from_config(model_class: type[PreTrainedModel], config: Any, attention: str) -> PreTrainedModel:
    """Makes a model as a user does, by class, config and backend; experts run in plain torch, of any width."""
    model: PreTrainedModel = model_class._from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    return model.eval().float()


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Draws weights so large that attention matters: with the usual 0.02 tiny models attend to all keys equally."""
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            parameter.normal_(0, 1.0 if "embed" in name and parameter.ndim == 2 else max(fan_in, 1) ** -0.5)
        elif not parameter.isfinite().all() or parameter.abs().max() > 100:
            parameter.normal_(0, 0.1)


def switched(exact: PreTrainedModel, attention: str = BACKEND) -> PreTrainedModel:
    """Makes a model with the config and weights of another one and with another attention."""
    torch.manual_seed(0)
    model = _from_config(type(exact), copy.deepcopy(exact.config), attention)
    with torch.no_grad():
        for kind in (nn.Module.parameters, nn.Module.buffers):
            for own, other in zip(kind(model), kind(exact), strict=True):
                own.copy_(other)
    return model


def configure(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Sets options in every config of a model."""
    for module in model.modules():
        if hasattr(module, "config"):
            with contextlib.suppress(Exception):
                module.config.favor = {**options, "exact_below": 0}  # type: ignore[union-attr]


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Runs a model; gives its floating-point outputs by name."""
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
    """Computes the largest relative error of outputs by name, of real tokens if there is a mask `[B, L]` of them."""
    errors = [0.0]
    if mask is not None:  # a pooled output may come from a padded token
        rows = {name: value for name, value in expected.items() if value.shape[:2] == mask.shape}
        found, expected = ({n: own[n][mask.bool()] for n in rows} if rows else own for own in (found, expected))
    for name in expected:
        left, right = (torch.nan_to_num(part[name], 0.0, 0.0, 0.0) for part in (found, expected))
        norm = right.norm().item()
        if norm > 0:
            errors.append((left - right).norm().item() / norm)
    return max(errors)


def _batches(exact: PreTrainedModel, inputs: Inputs) -> Batches:
    """Makes all batches that a model takes: as found, padded right and left, with a mask of ones, with two types."""
    batches: Batches = {"whole": (inputs, None)}
    for name in ("right", "left", "ones", "types"):
        with contextlib.suppress(Exception):
            batch = with_types(exact, inputs) if name == "types" else padded(inputs, name)
            if batch is not None and run(exact, batch):
                batches[name] = (batch, batch["attention_mask"] if name in ("right", "left") else None)
    return batches


def _apart(exact: PreTrainedModel, sdpa: PreTrainedModel, batches: Batches) -> dict[str, float]:
    """Gives the batches for which transformers' own "sdpa" and "eager" differ, and by how much."""
    found = {}
    for name, (batch, mask) in batches.items():
        with contextlib.suppress(Exception):
            found[name] = distance(run(sdpa, batch), run(exact, batch), mask)
    return {name: error for name, error in found.items() if not error < TOLERANCE}


def _compared(
    exact: PreTrainedModel, sdpa: PreTrainedModel | None, model: PreTrainedModel, batches: Batches
) -> dict[str, Any]:
    """Finds category, reason and numbers of a model with the backend; `exact` is with "eager", sdpa None if refused."""
    inputs = batches["whole"][0]
    expected = run(exact, inputs)
    configure(model, FEW)
    try:
        run(model, inputs)
    except ValueError as error:
        if "sinusoidal positions" not in str(error):
            raise
        configure(model, {"features": "landmark", "selected_keys": 0, **FEW})
    with Watch().watching() as watch:
        change = distance(run(model, inputs), expected)
    result: dict[str, Any] = {"calls": watch.calls, "estimated": watch.estimated, "local": watch.local}
    result |= {"own_attention": sorted(watch.silent), "few": change}
    if not watch.calls and not watch.silent:
        return {**result, "category": "no attention", "reason": "no attention in this class"}
    if not watch.calls or watch.exact:
        what = "is not estimated" if watch.calls else "calls no backend"
        names = ", ".join(sorted(watch.exact if watch.calls else watch.silent))
        return {**result, "category": "silently exact", "reason": f"{names} {what}"}
    batches, result["types"] = _without_refused(model, batches)
    errors = _errors(exact, model, batches)
    result |= {"errors": errors, "padding": sorted({"right", "left"} & set(batches))}
    nearest, of_sdpa = errors, False
    if sdpa is not None:
        result["errors_to_sdpa"] = to_sdpa = _errors(sdpa, model, batches)
        nearest = {name: min(error, to_sdpa[name]) for name, error in errors.items()}
        of_sdpa = not max(errors.values()) < TOLERANCE
    if not max(nearest.values()) < TOLERANCE:
        return {**result, "category": "wrong", "reason": f"relative error {max(nearest.values()):.1e}"}
    if not watch.estimated:
        return {**result, "category": "local", "reason": "all layers see a window or a chunk, and stay exact"}
    notes = ["as sdpa, from which eager differs"] if of_sdpa else []
    notes += ["as eager, from which sdpa differs"] if sdpa and not max(to_sdpa.values()) < TOLERANCE else []
    notes += ["hardly depends on attention"] if change < TOLERANCE else []
    return {**result, "category": "equal", "reason": "; ".join(notes)}


def _without_refused(model: PreTrainedModel, batches: Batches) -> tuple[Batches, str]:
    """Leaves out the batch with two types if it is refused, as a prefix language model does, and says why."""
    if "types" not in batches:
        return batches, "not taken"
    try:
        run(model, batches["types"][0])
    except ValueError as error:
        return {name: batch for name, batch in batches.items() if name != "types"}, f"refused: {_short(error)}"
    return batches, "taken"


def _errors(exact: PreTrainedModel, model: PreTrainedModel, batches: dict[str, Any]) -> dict[str, float]:
    errors = {}
    for way, options in WAYS.items():
        configure(model, options)
        for name, (batch, mask) in batches.items():
            errors[f"{way}, {name}"] = distance(run(model, batch), run(exact, batch), mask)
    return errors


def _raised(error: Exception, where: str) -> dict[str, Any]:
    """Classifies an error: a ValueError or NotImplementedError of favor is a refusal, any other is a crash."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(favor.__file__).parent in Path(frame.filename).parents or "favor" in str(error)
    refused = isinstance(error, ValueError | NotImplementedError) and ours
    reason = _short(error) if refused else f"{_short(error)} @{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return {"category": "refused" if refused else "crash", "reason": reason, "raised": where}


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"[:300]


def generation(exact: PreTrainedModel, model: PreTrainedModel, inputs: dict[str, Any]) -> str:
    """Compares logits with a `FavorCache`, for a prompt and then token by token, with logits without a cache.

    Gives "equal" with the number of layers that keep a state, "refused", "wrong" or "crash" with the reason, or "not
    run" with the reason, for example if transformers' own cache does not give the logits without a cache either.
    """
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or len(inputs) > 1:
        return "not run: no plain tokens"
    try:
        if _by_token_error(exact, ids, DynamicCache(config=exact.config)) > TOLERANCE:
            return "not run: DynamicCache differs from no cache with exact attention"
    except Exception as error:
        return f"not run: DynamicCache fails with exact attention ({type(error).__name__})"
    cache = favor.FavorCache(model.config)
    try:
        error_of = _by_token_error(model, ids, cache)
    except (ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        return f"{'refused' if 'FavorCache' in text or 'favor' in text else 'crash'}: {text[:160]}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    states = sum(isinstance(layer, StreamLayer) for layer in cache.layers)
    if not error_of < TOLERANCE:
        return f"wrong: {error_of:.1e}"
    return f"equal: {states} of {len(cache.layers)} layers keep a state"


@torch.no_grad()
def _by_token_error(model: PreTrainedModel, ids: Tensor, cache: Any) -> float:
    """Computes the relative error of the logits of a prompt and then token by token with a cache."""
    pieces = (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1))
    logits = [model(input_ids=piece, past_key_values=cache, use_cache=True).logits[:, -1:] for piece in pieces]
    whole = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 :]
    return distance({"logits": torch.cat(logits, 1)}, {"logits": whole})


class Watch:
    """Counts calls of the backend while `watching`, and finds attention modules that make no call."""

    def __init__(self) -> None:
        # Calls: all, those whose mask or arguments say that the layer sees a window or a chunk only, and those that
        # reached the estimator.
        self.calls = self.local = self.estimated = 0
        self.exact: set[str] = set()  # classes of modules with a call that was neither local nor estimated
        self.silent: set[str] = set()  # classes of attention modules that ran without any call
        self._stack: list[list[bool]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Replaces the attention function and the estimator by functions that count."""
        original, estimator = ALL_ATTENTION_FUNCTIONS[BACKEND], backend_module.favor_attention

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = self.estimated
            for flag in self._stack:
                flag[0] = True
            out = original(module, *args, **kwargs)
            self.calls += 1
            if self.estimated == before:
                mask = kwargs.get("attention_mask", args[3] if len(args) > 3 else None)
                sees = getattr(mask, "favor_visibility", None)
                is_local = sees is not None and (sees.reach is not None or sees.dense)
                self.local += (is_local := is_local or kwargs.get("sliding_window") is not None)
                self.exact |= set() if is_local else {type(module).__name__}
            return out

        def estimate(*args: Any, **kwargs: Any) -> Any:
            self.estimated += 1
            return estimator(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            stack.callback(AttentionInterface.register, BACKEND, original)
            stack.enter_context(mock.patch.object(backend_module, "favor_attention", estimate))
            AttentionInterface.register(BACKEND, attention)
            yield self

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _is_attention(module):
            self._stack.append([False])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not _is_attention(module) or self._stack.pop()[0]:
            return
        if not any(_is_attention(part) for part in module.modules() if part is not module):
            self.silent.add(type(module).__name__)


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__
