"""The FAVOR backends of transformers: attention function and mask function for every name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from favor import registry
from favor.attention import favor_attention
from favor.attention.packing import Packing
from favor.config import FavorConfig, feature_family
from favor.features import Parameters
from favor.integrations.adapt.observe import register_observer
from favor.integrations.cache import CACHE_LAYER, StreamLayer, state_of
from favor.integrations.engines import check_exact_below, heads_of_process
from favor.integrations.exact import Call, by_length, exact_attention, key_counts
from favor.integrations.first_pass import LINEAR, note
from favor.integrations.layer import (
    ALL_EXACT,
    WEIGHTS_OF,
    all_exact,
    decodes,
    is_self_attention,
    layer_number,
    layer_options,
    layer_state,
    redraw_epoch,
    stored_choice,
    stored_parameters,
)
from favor.integrations.loading import register_loading
from favor.integrations.masks import Visibility, favor_mask, refuse, visibility
from favor.integrations.stored import weights_of
from favor.kernels import StreamState
from favor.kernels.dispatch import is_exporting
from favor.registry import AnyFamily

_logger = logging.getLogger("favor")

# Names that transformers gives to the lengths of packed sequences.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register() -> None:
    """Registers all backends with transformers; `import favor` calls it."""
    for name in registry.BACKENDS:
        register_backend(name)
    register_observer()
    register_loading()


def register_backend(name: str) -> None:
    """Registers the attention function and the mask function of one backend with transformers."""
    AttentionInterface.register(name, partial(favor_attention_forward, name))
    AttentionMaskInterface.register(name, favor_mask)


def register_features(family: AnyFamily) -> AnyFamily:
    """Makes a family of features known: as `features=`, as a backend, to calibration and to checkpoints.

    Args:
        family: a subclass of `favor.features.PositiveFeatures` (with `fit_moments`) or `SignedFeatures` (with `phi`)
            that has a `name`. Its class attributes say what it is able to do, see `favor.registry.Family`; its backends
            are those of its attribute `backends`, or `favor_` and its name.

    Returns:
        The class, so that this can be used as a decorator.

    Raises:
        TypeError: if it is not such a class. ValueError: if another family has the name.

    Example:
        >>> import favor
        >>> @favor.register_features
        ... class Mine(favor.features.PosRF):
        ...     name = "mine"
        ...     backends = ("favor_mine",)
        >>> "favor_mine" in favor.BACKENDS
        True
    """
    registry.register(family)
    for name in registry.backends_of(family):
        register_backend(name)
    return family


def favor_attention_forward(
    backend: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for the backends, with the signature that transformers calls.

    Dropout drops each attention weight with the given probability, like softmax attention; the weights that one key
    gives to the queries of a head are dropped together, since they are never formed one by one.

    Args:
        backend: name of the backend.
        module: the attention module; its config holds the options, `config.favor`.
        query: `[B, H, L, d]`.
        key, value: `[B, Hk, S, d]`, `[B, Hk, S, dv]`, heads not repeated.
        attention_mask: from `favor_mask`, or any mask that `favor.integrations.masks.visibility` reads.
        scaling: factor of the logits, default 1/sqrt(d).
        dropout: probability, 0 in evaluation.
        is_causal: used if the mask does not say it; default `module.is_causal`.
        **kwargs: further arguments of the model; refused if they would change the result. `cu_seq_lens_q`,
            `cu_seq_lens_k`, `max_length_q` and `max_length_k` are the lengths of packed sequences. `favor_state` is the
            `favor.kernels.StreamState` of causal attention piece by piece.

    Returns:
        `[B, L, H, dv]`, contiguous, and None for the attention weights, which never exist.

    Raises:
        ValueError: naming what is not supported and what to use instead.
    """
    refuse(kwargs, module)
    lengths = [kwargs.get(name) for name in _LENGTHS]
    packed = lengths[0] is not None or lengths[1] is not None
    cached = getattr(key, CACHE_LAYER, None)
    length, key_length = query.shape[2], key.shape[2]
    # A state holds the keys of earlier tokens; a mask covers all tokens.
    known = key_length if cached is None else cached.length
    shape = (query.shape[0], length, known)
    sees = visibility(module, attention_mask, is_causal, shape, kwargs.get("sliding_window"), packed)
    if cached is not None and sees.padding is not None:
        sees = sees._replace(padding=sees.padding[:, known - key_length :])
    packing = Packing.of(query, key, sees.causal, *lengths) if packed else None
    call = Call(module, sees, scaling, dropout, packing)
    name, options = layer_options(module, backend)
    if name is None or sees.reach is not None or sees.dense:
        _account(module, known, "exact: another part of the model was switched" if name is None else _local(sees))
        return exact_attention(call, query, key, value, attention_mask), None

    causal = sees.causal
    plan, choice = _plan(name, tuple(sorted(options.items())), query.device.type, causal), stored_choice(module)
    if cached is not None and not causal:  # cross attention, whose keys do not grow
        cached.keep(key, value)
        cached = None
    state = cached or kwargs.get("favor_state")
    if state is not None and (plan.exact_below or choice.get("exact_heads")):
        raise ValueError(
            "a stream or a FavorCache does not know how long it will be, and exact attention has no state: "
            + (f"set exact_below=0 (it is {plan.exact_below})." if plan.exact_below else "keep no exact heads.")
        )
    keys = key_length if packing is None else packing.longest_key
    if is_exporting():
        check_exact_below(keys, plan.exact_below)
    if keys < plan.exact_below:
        _account(module, known, f"exact: fewer keys than exact_below = {plan.exact_below}")
        return exact_attention(call, query, key, value), None
    if all_exact(choice):
        _account(module, known, f"exact: {ALL_EXACT}")
        return exact_attention(call, query, key, value), None

    counts = key_counts(sees, packing, plan.exact_below) if plan.exact_below else ()
    few, linear = sum(count < plan.exact_below for count in counts), partial(_estimated, name, plan, state)
    _account(module, known, _by_rows(few, len(counts), plan, _runs(plan, causal, choice.get("window", plan.window))))
    if few:
        return by_length(call, (query, key, value), counts, plan.exact_below, linear).contiguous(), None
    return linear(call, query, key, value).contiguous(), None


def _estimated(
    backend: str,
    plan: _Plan,
    state: StreamState | StreamLayer | None,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Computes attention `[B, L, H, dv]` with the parameters that the layer stores, exact in the heads that stay exact.

    Args:
        backend: its name.
        plan: the options of the layer.
        state: of earlier tokens, or the layer of a cache that holds it; None for a whole sequence.
        call: the arguments that exact attention takes too.
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
    """
    module, causal, choice = call.module, call.sees.causal, stored_choice(call.module)
    if plan.statistics == "corrected" and (causal or decodes(module)):
        raise ValueError('statistics="corrected" is for encoders; a decoder needs "calibrated" (see favor.calibrate).')
    stored = None if plan.statistics == "batch" else _stored(module, choice, plan)
    weighted = stored is not None and stored.log_weights is not None
    # A layer that was loaded as a part of another model may have another number.
    layer = choice[WEIGHTS_OF]["layer"] if weighted else layer_number(module)
    redraw = redraw_epoch(module, plan.redraw_interval)
    if plan.selected_keys and is_exporting() and not plan.asks_for_selected:
        _logger.warning(
            "favor: an exported program has no operator for selected keys, so its landmarks select none. Set "
            "selected_keys=0 to compute the same here."
        )
        plan = plan._replace(selected_keys=0)
    if isinstance(state, StreamLayer):
        state = state_of(state, query, (backend, plan, dict(choice), redraw))
    has_window = is_self_attention(module, causal, query.shape[2], key.shape[2])
    has_window = has_window and registry.FAMILIES[plan.family].supports_window
    window = choice.get("window", plan.window) if has_window else 0
    exact_heads, drawn = choice.get("exact_heads", ()), None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        stored, exact_heads, drawn = heads_of_process(module, key.shape[1], stored, exact_heads)
    estimate = _Estimate(call, plan, layer, redraw, window, state, drawn)
    heads = partial(exact_attention, call), partial(_linear, estimate)
    return by_head(query, key, value, stored, exact_heads, *heads)


def _account(module: nn.Module, keys: int, account: str) -> None:
    """Tells the log what a layer runs, at the first forward pass of its model."""
    if torch.compiler.is_compiling():  # first of all: a compiler would guard what follows
        return
    state = layer_state(module)
    if state is not None and state.first_pass is not None and not state.first_pass.is_told:
        note(state.first_pass, state.number, account, keys)


def _runs(plan: _Plan, causal: bool, window: int) -> str:
    """Says what a layer runs whose attention is estimated."""
    if not registry.FAMILIES[plan.family].selects_keys:
        return f"{LINEAR}{plan.family}, M = {plan.num_features}, window {window}"
    means = "one mean for 256 keys" if causal else f"{plan.num_features} means"
    return f"{LINEAR}{plan.family}, {plan.selected_keys} selected keys and {means}"


def _by_rows(few: int, rows: int, plan: _Plan, linear: str) -> str:
    """Says how a layer runs of which some rows may have too few keys, the others as `linear` says."""
    if not few:
        return linear
    others = f"; the others {linear}" if few < rows else ""
    return f"exact in {few} of {rows} rows, with fewer keys than exact_below = {plan.exact_below}{others}"


def _local(sees: Visibility) -> str:
    """Says how a layer runs that is local in the model: exactly, as the model defines it."""
    if sees.reach is None:
        return "local: exact, with a mask of all pairs"
    return f"local: exact, keys at most {sees.reach} tokens away"


def model_options(config: Any) -> FavorConfig:
    """Validates the options in the `favor` entry of a config of transformers; without an entry, gives the defaults."""
    return FavorConfig.from_dict(getattr(config, "favor", None))


class _Plan(NamedTuple):
    """The options of a layer as plain values, which a compiler can treat as constants."""

    family: str
    options: tuple[tuple[str, Any], ...]
    num_features: int
    exact_below: int
    seed: int
    redraw_interval: int
    orthogonal: bool
    window: int
    statistics: str
    kernel: str
    selected_keys: int
    asks_for_selected: bool


class _Estimate(NamedTuple):
    """How linear attention estimates one call.

    Attributes:
        call: the arguments that exact attention takes too.
        plan: the options of the model.
        layer, redraw: numbers of the layer and of its draw, which choose the random directions.
        window: length of exact blocks, 0 for none.
        state: what earlier tokens left behind; None for a whole sequence.
        key_heads: which of the heads with directions these are, see `favor.favor_attention`; None for all.
    """

    call: Call
    plan: _Plan
    layer: int
    redraw: int
    window: int
    state: StreamState | None
    key_heads: tuple[int, int] | None = None


@torch.compiler.assume_constant_result
def _plan(backend: str, items: tuple[tuple[str, Any], ...], device_type: str, is_causal: bool) -> _Plan:
    return _cached_plan(backend, items, device_type, is_causal)


@lru_cache(maxsize=64)
def _cached_plan(backend: str, items: tuple[tuple[str, Any], ...], device_type: str, is_causal: bool) -> _Plan:
    config = FavorConfig.from_dict(dict(items))
    name, options = feature_family(backend, config)
    family = registry.FAMILIES[name]
    fitted = config.statistics == "calibrated" or family.needs_statistics
    return _Plan(
        name,
        tuple(options.items()),
        config.num_features,
        config.exact_threshold(device_type, is_causal, name),
        config.seed,
        config.redraw_interval if family.is_drawn else 0,
        config.orthogonal,
        config.window if family.supports_window else 0,
        config.statistics if fitted and family.takes_parameters else "batch",
        config.kernel if family.has_kernel else "auto",
        config.selected(name, is_causal),
        dict(items).get("selected_keys") is not None,
    )


def _stored(module: nn.Module, choice: dict[str, Any], plan: _Plan) -> Parameters | None:
    stored, found = stored_parameters(module), (choice.get("family"), choice.get("kind"))
    if not registry.FAMILIES[plan.family].needs_statistics and found != (plan.family, "calibrated"):
        layers = getattr(module.config, "favor_layers", None) or {}
        if not any(own["family"] == plan.family for own in layers.values() if "family" in own):
            return None  # the family needs no parameters, and the model has no weights for it
    if stored is None or found != (plan.family, plan.statistics):
        has = "none" if stored is None else f"{found[1]} parameters of {found[0]}"
        how = "favor.calibrate(model, dataloader)" if plan.statistics == "calibrated" else "favor.train.distill"
        raise ValueError(
            f'statistics="{plan.statistics}" needs parameters of {plan.family} in every layer, and '
            f'{type(module).__name__} has {has}. Make them with {how}, or set statistics="batch".'
        )
    directions = choice.get("directions")
    if directions is not None and (plan.num_features != directions or plan.redraw_interval):
        raise ValueError(
            f"{type(module).__name__} has {directions} learned directions in each head, and num_features is "
            f"{plan.num_features} and redraw_interval {plan.redraw_interval}: set num_features={directions} and "
            "redraw_interval=0, or learn others with favor.train.distill."
        )
    learned = choice.get(WEIGHTS_OF)
    if learned is not None:
        present = weights_of(choice, plan.window, plan, learned["layer"])
        if plan.redraw_interval or present != learned:
            wanted = ", ".join(f"{name}={value}" for name, value in learned.items() if name != "layer")
            raise ValueError(
                f"{type(module).__name__} has weights of features, learned for {wanted} and redraw_interval=0; set "
                "these options again, or call favor.calibrate with the new ones."
            )
    return stored


def by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: Parameters | None,
    exact_heads: Sequence[int],
    exact: Callable[[Tensor, Tensor, Tensor], Tensor],
    linear: Callable[[Tensor, Tensor, Tensor, Parameters | None], Tensor],
) -> Tensor:
    """Computes attention `[B, L, H, dv]` with some key heads exact, and the query heads that belong to them.

    Args:
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`.
        parameters: of all key heads, or None.
        exact_heads: numbers of key heads.
        exact, linear: both kinds of attention, for any number of heads.
    """
    if not exact_heads:
        return linear(query, key, value, parameters)
    number = key.shape[1]
    if max(exact_heads) >= number:
        raise ValueError(f"exact_heads must be key heads from 0 to {number - 1}, got {list(exact_heads)}.")
    linear_heads = [head for head in range(number) if head not in exact_heads]
    if not linear_heads:
        return exact(query, key, value)

    def part(tensor: Tensor, heads: Sequence[int]) -> Tensor:
        return tensor.unflatten(1, (number, -1))[:, list(heads)].flatten(1, 2)

    def both(heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        return part(query, heads), part(key, heads), part(value, heads)

    own = None if parameters is None else parameters.heads(linear_heads)
    outs = [exact(*both(exact_heads)), linear(*both(linear_heads), own)]
    groups = query.shape[1] // number
    joined = torch.cat([out.unflatten(2, (-1, groups)) for out in outs], dim=2)
    order = torch.tensor([*exact_heads, *linear_heads], device=query.device).argsort()
    return joined[:, :, order].flatten(2, 3)


def _linear(estimate: _Estimate, query: Tensor, key: Tensor, value: Tensor, parameters: Parameters | None) -> Tensor:
    """Estimates attention `[B, L, H, dv]`, with stored parameters of these key heads if there are any."""
    call, plan = estimate.call, estimate.plan
    if call.dropout > 0:
        value = value * nn.functional.dropout(value.new_ones(*value.shape[:-1], 1), call.dropout)
    is_correction = plan.statistics == "corrected"
    out = favor_attention(
        query,
        key,
        value,
        features=registry.FAMILIES[plan.family](**dict(plan.options)),
        num_features=plan.num_features,
        key_padding_mask=call.sees.padding,
        is_causal=call.sees.causal,
        scale=call.scaling,
        seed=plan.seed,
        layer=estimate.layer,
        redraw=estimate.redraw,
        orthogonal=plan.orthogonal,
        use_statistics=not decodes(call.module),
        parameters=None if is_correction else parameters,
        correction=parameters if is_correction else None,
        window=estimate.window,
        state=estimate.state,
        kernel=plan.kernel,
        key_heads=estimate.key_heads,
        selected_keys=plan.selected_keys,
        **({} if call.packing is None else call.packing.for_kernel()),
    )
    return out.transpose(1, 2)
