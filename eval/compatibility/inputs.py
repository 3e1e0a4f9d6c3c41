"""Makes inputs for any model from the names of the arguments of its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

BATCH, LENGTH = 2, 24
Inputs = dict[str, Any]


def all_inputs(model: nn.Module, config: PretrainedConfig) -> Iterator[Inputs]:
    """Yields inputs that may fit the forward pass of a model, the likeliest first."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    main = getattr(model, "main_input_name", "input_ids")
    for more in _COMPANIONS:
        if not all(name in parameters for name in more):
            continue
        for name in dict.fromkeys([main, *_MAIN]):
            if (
                name not in parameters
                or name in more
                or (more and name == "inputs_embeds" and "input_ids" in parameters)
            ):
                continue
            others = [other for other in dict.fromkeys([*needed, *more]) if other != name]
            if name in _ENCODED and "decoder_input_ids" in parameters and "decoder_input_ids" not in others:
                others.append("decoder_input_ids")
            yield from _fill([name, *others], config, {})
    if needed and not any(name in parameters for name in _MAIN):
        yield from _fill(needed, config, {})


# Arguments that some models need although the arguments have a default.
_COMPANIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("bbox",),
    ("pixel_values",),
    ("input_features",),
    ("input_values",),
    ("attention_mask",),
    ("input_features_mask",),
    ("encoder_hidden_states",),
    ("encoder_hidden_states", "encoder_attention_mask"),
    ("bbox", "pixel_values"),
    ("pixel_mask",),
    ("image_grid_thw",),
    ("image_position_ids",),
    ("pixel_position_ids",),
    ("spatial_shapes",),
    ("position_embeddings",),
)
_ENCODED = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")
_MAIN = (
    "input_ids",
    "pixel_values",
    "input_features",
    "input_values",
    "inputs_embeds",
    "hidden_states",
    "pixel_values_videos",
    "past_values",
    "audio_values",
    "inputs",
)


def _fill(names: list[str], config: Any, rest: Inputs) -> Iterator[Inputs]:
    if not names:
        yield rest
        return
    for value in _candidates(names[0], config):
        yield from _fill(names[1:], config, {**rest, names[0]: value})


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(config: Any, seed: int = 0, length: int = LENGTH) -> Tensor:
    sizes = [value for value in _values(config, "vocab_size") if value > 0] or [32]
    high = max(6, min([*sizes, 100]) - 8)  # below the special tokens
    return torch.randint(5, high, (BATCH, length), generator=_generator(seed))


def _values(config: Any, name: str) -> list[int]:
    """Lists the values of a field in a config and its sub-configs, outermost first."""
    own = getattr(config, name, None)
    found = [own] if isinstance(own, int) and not isinstance(own, bool) else []
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            found += _values(value, name)
    return found


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    for name in names:
        if values := _values(config, name):
            return values[0]
    return default


def _width(config: Any) -> list[int]:
    names = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_hidden_size", "decoder_hidden_size")
    found = [value for name in names for value in _values(config, name)]
    return list(dict.fromkeys(found))[:4] or [64]


def _image_sizes(config: Any) -> list[tuple[int, int]]:
    own = [getattr(part, "image_size", None) for part in _configs(config)]
    sizes = [(v, v) if isinstance(v, int) else tuple(v) for v in own if isinstance(v, int | list | tuple)]
    return list(dict.fromkeys([*(s for s in sizes if len(s) == 2), (64, 64), (224, 224)]))


def _configs(config: Any) -> list[Any]:
    found = [config]
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            found += _configs(value)
    return found


def _candidates(name: str, config: Any) -> list[Any]:
    """Lists values that an argument may take, the likeliest first."""
    normal = lambda *shape: torch.randn(*shape, generator=_generator())  # noqa: E731
    if name in ("input_ids", "decoder_input_ids", "text_input_ids"):
        books = [
            v for field in ("num_codebooks", "num_quantizers", "num_channels") for v in _values(config, field) if v > 3
        ][:1]
        several = [_ids(config).unsqueeze(-1).expand(-1, -1, n).contiguous() for n in books]
        short = [_ids(config)[:, :16]] if _first(config, ("max_position_embeddings",), 512) < LENGTH else []
        return [*short, _ids(config), *several]
    if "pixel_values" in name or name in ("images", "image", "pixel_features"):
        channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
        images = [normal(BATCH, channels, *size) for size in _image_sizes(config)]
        frames = [v for field in ("num_frames", "frames_per_clip") for v in _values(config, field)] or [2]
        videos = [normal(BATCH, frames[0], channels, *size) for size in _image_sizes(config)[:2]]
        patch = _first(config, ("patch_size",), 4)
        flat = [normal(32, channels * patch * patch * n) for n in (1, 2)]
        return (
            [*videos, *images] if "video" in name else [*images, *videos, *flat, normal(BATCH, 32, channels * patch**2)]
        )
    if name == "input_features":
        mels = [v for field in ("num_mel_bins", "feature_size", "n_mels", "input_size") for v in _values(config, field)]
        mels = list(dict.fromkeys([*mels, 80, 128]))
        long = 2 * _first(config, ("max_source_positions",), 48)
        return [normal(*s) for m in mels for s in ((BATCH, m, long), (BATCH, 96, m), (BATCH, m, 96), (BATCH, 1, 96, m))]
    if name in ("input_values", "audio_values", "input_audio"):
        shapes = [(BATCH, 4000), (BATCH, 1, 4000), (BATCH, 80, 96), (BATCH, 96, 80), (BATCH, 1, 128, 128)]
        if mels := _values(config, "num_mel_bins"):
            shapes.insert(0, (BATCH, _first(config, ("max_length",), 96), mels[0]))
        return [normal(*s) for s in shapes]
    if name == "codebook_idx":
        return [2]
    if name == "prefix_length":
        return [4]
    if name in _HIDDEN or name.endswith("_hidden_states"):
        patch, channels = _first(config, ("patch_size",), 14), _first(config, ("in_channels", "num_channels"), 3)
        times = _first(config, ("temporal_patch_size",), 1)
        flat = [normal(32, times * channels * patch**2)] if name == "hidden_states" else []
        return [*(normal(BATCH, LENGTH, width) for width in _width(config)), *flat]
    if name in (
        "attention_mask",
        "pixel_mask",
        "mask",
        "padding_mask",
        "input_features_mask",
        "encoder_attention_mask",
    ):
        sides = [torch.ones(BATCH, *size, dtype=torch.long) for size in _image_sizes(config)]
        lengths = [torch.ones(BATCH, n, dtype=torch.long) for n in (LENGTH, 96)]
        return sides if name == "pixel_mask" else [*lengths, lengths[1].bool()]
    if name == "bbox":
        return [torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)]
    if name == "grid_thw" or name.endswith("grid_thw"):
        return [torch.tensor([[1, 4, 8]]), torch.tensor([[1, 8, 4]])]
    if name == "past_values":
        return [normal(BATCH, n) if c == 1 else normal(BATCH, n, c) for n, c in _series(config)]
    if name in ("position_ids",):
        return [torch.arange(LENGTH).expand(BATCH, -1)]
    return []


_HIDDEN = ("inputs_embeds", "hidden_states", "inputs", "embeddings", "input_embeds", "query_embeds", "x")


def _series(config: Any) -> list[tuple[int, int]]:
    length = _first(config, ("context_length",), 64)
    channels = _first(config, ("num_input_channels", "input_size"), 1)
    return [(length, channels), (length, 1), (64, 1)]


def padded(inputs: Inputs, side: str) -> Inputs | None:
    """Gives text inputs with eight padded tokens in the second row, or with a mask of "ones"; None for others."""
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or "pixel_values" in inputs:
        return None
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :8] = 0
    elif side == "right":
        mask[1, -8:] = 0
    return {**inputs, "attention_mask": mask}


def with_types(model: nn.Module, inputs: Inputs) -> Inputs | None:
    """Gives text inputs whose second half is of another type, such as the answer after a prompt; None for others."""
    ids, known = inputs.get("input_ids"), inspect.signature(model.forward).parameters
    name = next((name for name in ("token_type_ids", "mm_token_type_ids") if name in known), None)
    if ids is None or ids.ndim != 2 or name is None:
        return None
    types = torch.zeros_like(ids)
    types[:, ids.shape[1] // 2 :] = 1
    return {**inputs, name: types}
