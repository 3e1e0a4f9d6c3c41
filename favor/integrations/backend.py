"""The FAVOR backends of transformers: attention function and mask function for every name."""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import AttentionInterface, AttentionMaskInterface

from favor import registry
from favor.attention import favor_attention
from favor.attention.functional import HEAD_GROUPS, SEQUENCE_GROUPS
from favor.attention.packing import Packing
from favor.config import FavorConfig, feature_family
from favor.features import Parameters
from favor.integrations.adapt.observe import register_observer
from favor.integrations.cache import CACHE_LAYER, StreamLayer
from favor.integrations.exact import Call, by_head, by_length, exact_attention, key_counts, share_of
from favor.integrations.heads import with_whole_sequences
from favor.integrations.layer import (
    ALL_EXACT,
    LINEAR,
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
from favor.integrations.loading import register_loading, watch_adapters
from favor.integrations.masks import favor_mask, refuse, visibility
from favor.integrations.piece_length import warn_of_convolutions
from favor.integrations.positions import relative_of
from favor.integrations.stored import weights_of
from favor.kernels import StreamState
from favor.kernels.dispatch import is_exporting
from favor.registry import AnyFamily

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
    """Computes attention `[B, L, H, dv]`, contiguous, with the signature that transformers calls; gives no weights.

    Dropout drops each attention weight with the given probability, like softmax attention; the weights that one key
    gives to the queries of a head are dropped together, since they are never formed one by one.

    Args:
        module: the attention module; its config holds the options, `config.favor`.
        query, key, value: `[B, H, L, d]`, `[B, Hk, S, d]`, `[B, Hk, S, dv]`, heads not repeated.
        attention_mask: from `favor_mask`, or any mask that `favor.integrations.masks.visibility` reads.
        is_causal: used if the mask does not say it; default `module.is_causal`.
        **kwargs: further arguments of the model; refused if they would change the result. `favor_state` is the
            `favor.kernels.StreamState` of causal attention piece by piece; `favor_share` the `Share` of the heads.
    """
    if HEAD_GROUPS and "favor_share" not in kwargs:
        kwargs |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        attend = partial(favor_attention_forward, backend, module)
        return with_whole_sequences(attend, module, (query, key, value), attention_mask, kwargs), None
    relative = None if (bias := kwargs.pop("position_bias", None)) is None else relative_of(module, bias)
    refuse(kwargs, module)
    lengths = [kwargs.get(name) for name in _LENGTHS]
    packed = lengths[0] is not None or lengths[1] is not None
    cached = getattr(key, CACHE_LAYER, None)
    length, key_length = query.shape[2], key.shape[2]
    # A state holds the keys of earlier tokens; a mask covers all tokens.
    known = key_length if cached is None else cached.covered(key_length)
    shape = (query.shape[0], length, known)
    sees = visibility(module, attention_mask, is_causal, shape, kwargs.get("sliding_window"), packed)
    if cached is not None and sees.padding is not None:
        sees = sees._replace(padding=sees.padding[:, known - key_length :])
    packing = Packing.of(query, key, sees.causal, *lengths) if packed else None
    call = Call(module, sees, scaling, dropout, packing, relative, kwargs.get("favor_share"))
    name, options = layer_options(module, backend)
    if name is None or sees.reach is not None or sees.dense:
        how = "with a mask of all pairs" if sees.reach is None else f"keys at most {sees.reach} tokens away"
        account = "exact: another part of the model was switched" if name is None else f"local: exact, {how}"
        _account(module, known, account)
        return exact_attention(call, query, key, value, attention_mask), None

    plan, choice = _plan(name, tuple(sorted(options.items())), query.device.type, sees.causal), stored_choice(module)
    if cached is not None and not sees.causal:  # cross attention, whose keys do not grow
        cached.keep(key, value)
        cached = None
    state = cached or kwargs.get("favor_state")
    keys = key_length if packing is None else packing.longest_key
    _check_choice(plan, choice, state, keys)
    why = f"fewer keys than exact_below = {plan.exact_below}" if keys < plan.exact_below else ""
    why = why or (ALL_EXACT if all_exact(choice) else _needs_all_pairs(module, relative, length, key_length, plan))
    if why:
        _account(module, known, f"exact: {why}")
        return exact_attention(call, query, key, value), None

    counts = key_counts(sees, packing, plan.exact_below) if plan.exact_below else ()
    few, linear = sum(count < plan.exact_below for count in counts), partial(_estimated, name, plan, state)
    account = _runs(plan, sees.causal, choice.get("window", plan.window))
    if not few:
        _account(module, known, account)
        return linear(call, query, key, value).contiguous(), None
    account = f"; the others {account}" if few < len(counts) else ""
    reason = f"with fewer keys than exact_below = {plan.exact_below}"
    _account(module, known, f"exact in {few} of {len(counts)} rows, {reason}{account}")
    return by_length(call, (query, key, value), counts, plan.exact_below, linear).contiguous(), None


def _needs_all_pairs(module: nn.Module, relative: Any, length: int, keys: int, plan: _Plan) -> str:
    """Says why relative positions make a layer exact, "" if they do not; raises a ValueError where it cannot be."""
    if relative is not None and length < keys:
        return "relative positions of fewer queries than keys"
    if isinstance(relative, Tensor) and plan.selected_keys < keys:
        refuse({"position_bias": relative}, module)
    return "a position bias for each pair, and no more keys than selected_keys" if isinstance(relative, Tensor) else ""


def _check_choice(plan: _Plan, choice: dict[str, Any], state: Any, keys: int) -> None:
    """Raises a ValueError where no length may be exact: with a state, in pieces, and in part in exported programs."""
    bound = plan.exact_below
    if SEQUENCE_GROUPS and bound:
        raise ValueError(
            "inside sequence_parallel each process would choose by the length of its own piece whether attention is "
            f"exact. Set exact_below=0 (it is {bound})."
        )
    if state is not None and (bound or choice.get("exact_heads")):
        instead = f"set exact_below=0 (it is {bound})." if bound else "keep no exact heads."
        raise ValueError(
            "a stream or a FavorCache does not know how long it will be, and exact attention has no state: " + instead
        )
    if is_exporting() and not (statically_known_true(keys < bound) or statically_known_true(keys >= bound)):
        raise ValueError(
            f"exact_below={bound} chooses exact or linear attention by the number of keys, and an exported program has "
            "only one of them. Set exact_below=0, as in favor.configure(model, exact_below=0), or export a range of "
            "lengths on one side of it."
        )


def _account(module: nn.Module, keys: int, account: str) -> None:
    """Tells the log what a layer runs, at the first forward pass of its model."""
    if torch.compiler.is_compiling():  # first of all: a compiler would guard what follows
        return
    state = layer_state(module)
    if state is None or state.first_pass is None or state.first_pass.is_told:
        return
    state.first_pass.note(state.number, account, keys)
    if state.first_pass.is_told:
        watch_adapters()  # peft may have been imported after the model was built


def _runs(plan: _Plan, causal: bool, window: int) -> str:
    """Says what a layer runs whose attention is estimated."""
    if not registry.FAMILIES[plan.family].selects_keys:
        return f"{LINEAR}{plan.family}, M = {plan.num_features}, window {window}"
    means = "one mean for 256 keys" if causal else f"{plan.num_features} means"
    return f"{LINEAR}{plan.family}, {plan.selected_keys} selected keys and {means}"


def _estimated(
    backend: str,
    plan: _Plan,
    state: StreamState | StreamLayer | None,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Computes attention `[B, L, H, dv]` with the parameters that the layer stores; some heads may stay exact."""
    module, causal, choice = call.module, call.sees.causal, stored_choice(call.module)
    if SEQUENCE_GROUPS:
        warn_of_convolutions(module)
    if plan.statistics == "corrected" and (causal or decodes(module)):
        raise ValueError('statistics="corrected" is for encoders; a decoder needs "calibrated" (see favor.calibrate).')
    stored = None if plan.statistics == "batch" else _stored(module, choice, plan)
    weighted = stored is not None and stored.log_weights is not None
    # A layer that was loaded as a part of another model may have another number.
    layer = choice[WEIGHTS_OF]["layer"] if weighted else layer_number(module)
    redraw = redraw_epoch(module, plan.redraw_interval)
    if plan.selected_keys and is_exporting() and not plan.asks_for_selected:
        logging.getLogger("favor").warning(
            "favor: an exported program has no operator for selected keys, so its landmarks select none. Set "
            "selected_keys=0 to compute the same here."
        )
        plan = plan._replace(selected_keys=0)
    if isinstance(state, StreamLayer):
        if torch.is_grad_enabled() and query.requires_grad:
            raise RuntimeError("a FavorCache is for inference: use torch.no_grad(), and a new cache.")
        state = state.read((backend, plan, dict(choice), redraw))
    has_window = is_self_attention(module, causal, query.shape[2], key.shape[2])
    has_window = has_window and registry.FAMILIES[plan.family].supports_window
    exact_heads, drawn, share = choice.get("exact_heads", ()), None, call.share
    if share is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        share = share_of(module, key.shape[1])
    if share is not None:
        drawn, stored, exact_heads = share.drawn(exact_heads), share.parameters(stored), share.exact_heads(exact_heads)
    options = {
        "features": registry.FAMILIES[plan.family](**dict(plan.options)),
        "num_features": plan.num_features,
        "key_padding_mask": call.sees.padding,
        "is_causal": causal,
        "scale": call.scaling,
        "seed": plan.seed,
        "layer": layer,
        "redraw": redraw,
        "orthogonal": plan.orthogonal,
        "use_statistics": not decodes(module),
        "window": choice.get("window", plan.window) if has_window else 0,
        "state": state,
        "kernel": plan.kernel,
        "key_heads": drawn,
        "selected_keys": plan.selected_keys,
        **({} if call.packing is None else call.packing.for_kernel()),
    }
    kind = "correction" if plan.statistics == "corrected" else "parameters"
    linear = partial(_linear, options, kind)
    if not exact_heads:
        return linear(call, query, key, value, stored)
    return by_head(call, query, key, value, stored, exact_heads, linear)


def _linear(
    options: dict[str, Any], kind: str, call: Call, query: Tensor, key: Tensor, value: Tensor, stored: Any
) -> Tensor:
    """Estimates attention `[B, L, H, dv]`, with stored parameters of these key heads, or a correction, if any."""
    if call.dropout > 0:
        value = value * nn.functional.dropout(value.new_ones(*value.shape[:-1], 1), call.dropout)
    options = {**options, "relative": call.relative, kind: stored}
    return favor_attention(query, key, value, **options).transpose(1, 2)


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
