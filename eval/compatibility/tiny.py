"""Makes the config of a tiny model from any config class of transformers, and its inputs, by rules on names.

All widths are divided by one number, so that widths that must fit still fit. One layer of each kind is kept, at least
two layers in all. Inputs are made for the names of the arguments of the forward pass.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, ResNetConfig

VOCABULARY = 128
WINDOW = 8  # of sliding-window layers: shorter than the inputs
_LAYERS = re.compile(
    r"^(n_layers?|depth|(\w+_)?num_(hidden_)?layers|num_(encoder|decoder|hidden|cross)\w*_layers|(en|de)coder_layers|"
    r"\w+_(num_)?layers|num_(encoder_|transformer_)?blocks|num_hidden_layers_\w+)$"
)
_NOT_LAYERS = re.compile(
    r"feat_extract|adapter|conv|residual|dense|shared|mlp_only|max_window|kv|nextn|mtp|indices|proj"
)
_MOST = {
    "(vocab_size|_vocab)$": VOCABULARY,
    "^(sliding_window|local_attention|attention_window_size|sliding_window_size)$": WINDOW,
    "^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$": 4,
    "experts_per_tok|^moe_(topk|top_k|k)$": 2,
    "^(max_position_embeddings|n_positions|max_source_positions|max_target_positions)$": 512,
}
_WIDTH = re.compile(
    r"hidden|dim$|dim_|_dim|d_model|d_inner|d_ff|d_kv|n_embd|n_inner|width|embed|rank|intermediate|ffn|channels|"
    r"inner|filters|proj|codevector|state_size|d_state|d_head|head_size|feature_size|nhid|_chn|linear"
)
_NOT_WIDTH = re.compile(
    r"kernel|vocab|layers|heads|num_|prob|token|_ids?$|index|image_|dropout|max_|chunk|window|length|ratio|factor|"
    r"act|stride|expand|position|groups|norm|query_dict"
)
_TOKEN = re.compile(r"token_id$|token_index$|_id$|_token$|_token_ids$")
_FIXED: dict[str, Any] = {
    **dict.fromkeys(["n_group", "num_group", "num_expert_group", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["attn_layer_offset", "expert_layer_offset"], 1),
    **dict.fromkeys(["num_conv_pos_embedding_groups", "attn_layer_period", "expert_layer_period"], 2),
    **dict.fromkeys(["layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob"], 0.0),
    **{"apply_spec_augment": False, "use_timm_backbone": False, "num_nextn_predict_layers": 0, "num_denoising": 0},
    **{"num_conv_pos_embeddings": 16, "num_queries": 20, "train_num_points": 32, "dtype": "float32"},
}

# Fields for which the rules are wrong, or that have no default, by family or model class.
_SERIES = {"prediction_length": 8, "context_length": 24, "lags_sequence": [1, 2, 3]}
_HEADS, _IMAGE = {"head_dim": 16}, {"vocabulary_map": {"<image>": 100}}

OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _HEADS),
    "aya_vision": {"vision_config.num_attention_heads": 8},
    "hunyuan_vl": {**_HEADS, "text_config.head_dim": 16},
    "nemotron": {"num_key_value_heads": 8},
    "vivit": {"num_frames": 8},  # at 32 there are more than 2048 keys
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "bros": {"dim_bbox_sinusoid_emb_2d": 48, "dim_bbox_sinusoid_emb_1d": 12, "dim_bbox_projection": 8},
    **dict.fromkeys(("chameleon", "emu3"), _IMAGE),
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"], "text_config.mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "gemma3n": {"num_kv_shared_layers": 0, "text_config.num_kv_shared_layers": 0},
    "xmod": {"default_language": "en_XX"},
}


def shrink(config: PretrainedConfig, factor: int = 8, image: int | None = 4, own: dict[str, Any] | None = None) -> Any:
    """Gives a small copy of a config: widths divided by `factor`, images of `image` patches a side (None: as they are).

    `own` are fields for which the rules are wrong, by name; fields of sub-configs have dotted names.
    """
    small, own = copy.deepcopy(config), own or {}
    fields = {name: value for name, value in vars(small).items() if not name.startswith("__")}
    layers = _layer_numbers(fields)
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig) and value.model_type.startswith("timm_"):
            changed: Any = _backbone()
        elif isinstance(value, PretrainedConfig):
            inner = {key.split(".", 1)[1]: v for key, v in own.items() if key.startswith(f"{name}.")}
            changed = shrink(value, factor, image, inner)
        else:
            changed = _changed(name, value, factor, layers)
        if changed is not value:
            _set(small, name, changed)
    _shrink_image(small, image)
    _cut_stages(small, config)
    _share_positions(small)
    _fit_tokens(small)
    for name, value in own.items():
        if "." not in name:
            _set(small, name, value)
    return small


def _backbone() -> PretrainedConfig:
    """Makes a config to replace a backbone of timm, which may not be installed."""
    stages = ["stage1", "stage2", "stage3", "stage4"]
    return ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=stages)  # type: ignore[call-arg]


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a validator that looks at one field at a time
        config.__dict__[name] = value


def _layer_numbers(fields: dict[str, Any]) -> dict[int, list[int]]:
    """Says, for each number of layers of the config, which layers stay: the first of each kind, and at least two."""
    found: dict[int, list[int]] = {}
    if "depths" in fields or len(fields.get("_out_features") or ()) > 1:
        return found  # as many layers as stages
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 2 and _is_layers(name):
            lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == value]
            kinds = list(zip(*[map(str, v) for v in lists if v and isinstance(v[0], str)], strict=True))
            kept = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
            found[value] = (kept + [i for i in range(value) if i not in kept][: max(0, 2 - len(kept))])[:8]
            found[value].sort()
    return found


def _is_layers(name: str) -> bool:
    return bool(_LAYERS.match(name)) and not _NOT_LAYERS.search(name)


def _changed(name: str, value: Any, factor: int, layers: dict[int, list[int]]) -> Any:
    if name in _FIXED and value is not None:
        return _FIXED[name]
    if isinstance(value, dict):
        return {key: _changed(str(key), v, factor, layers) for key, v in value.items()}
    if isinstance(value, list | tuple):
        if name == "depths":
            return type(value)(min(v, 2) for v in value)
        if len(value) in layers and not name.startswith("_out"):
            value = type(value)(value[i] for i in layers[len(value)])
        if value and all(isinstance(v, int) for v in value) and ("mrope" in name or _is_width(name)):
            return type(value)(_divided(v, factor) for v in value)
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, most in _MOST.items():
        if re.search(pattern, name):
            return min(value, most)
    if _is_layers(name) and value > 2:
        return len(layers.get(value, [0, 1]))
    return _divided(value, factor) if _is_width(name) else value


def _is_width(name: str) -> bool:
    return bool(_WIDTH.search(name)) and not _NOT_WIDTH.search(name)


def _divided(value: int, factor: int) -> int:
    return value // factor if value >= 2 * factor and value % factor == 0 else value


def _shrink_image(config: Any, image: int | None) -> None:
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is not None and isinstance(size, int) and isinstance(patch, int):
        _set(config, "image_size", min(size, image * patch))


def _cut_stages(small: Any, config: Any) -> None:
    """Lets a backbone with fewer layers give the output of its last layer."""
    names, layers = getattr(config, "stage_names", None), getattr(small, "num_hidden_layers", None)
    if names and isinstance(layers, int) and len(names) == getattr(config, "num_hidden_layers", 0) + 1 > layers + 1:
        small.stage_names = names[: layers + 1]
        small._out_features, small._out_indices = [f"stage{layers}"], [layers]


def _share_positions(small: Any) -> None:
    """Gives each of three kinds of positions its part of a head, if a model has kinds and its config names none."""
    rope = getattr(small, "rope_parameters", None)
    if type(small).__module__.split(".")[2] not in _kinds_of_positions() or not isinstance(rope, dict):
        return
    heads = getattr(small, "num_attention_heads", None)
    if "rope_type" not in rope or not isinstance(heads, int):
        return
    width = getattr(small, "head_dim", None) or small.hidden_size // heads
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    small.rope_parameters = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


@lru_cache(maxsize=1)
def _kinds_of_positions() -> set[str]:
    folder = Path(transformers.__file__).parent / "models"
    paths = folder.glob("*/modeling_*.py")
    return {path.parent.name for path in paths if '.get("mrope_section", [' in path.read_text().replace("[]", "")}


def _fit_tokens(config: Any) -> None:
    """Moves the numbers of special tokens to the end of the vocabulary."""
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) and size > 0 else VOCABULARY
    last = size
    for name, value in sorted(vars(config).items()):
        if _TOKEN.search(name) and isinstance(value, int) and not isinstance(value, bool) and value >= size > 40:
            last -= 1
            _set(config, name, last)
        elif _TOKEN.search(name) and isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            _set(config, name, [min(v, size - 1) for v in value])


BATCH, LENGTH = 2, 24
Inputs = dict[str, Any]


def all_inputs(model: nn.Module, config: PretrainedConfig) -> Iterator[Inputs]:
    """Yields inputs that may fit the forward pass of a model, the likeliest first."""
    every = inspect.signature(model.forward).parameters
    parameters = {name: own for name, own in every.items() if own.kind in (own.POSITIONAL_OR_KEYWORD, own.KEYWORD_ONLY)}
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    main = getattr(model, "main_input_name", "input_ids")
    for more in (more for more in _COMPANIONS if parameters.keys() >= {*more}):
        for name in dict.fromkeys([main, *_MAIN]):
            embeds = more and name == "inputs_embeds" and "input_ids" in parameters
            if name not in parameters or name in more or embeds:
                continue
            others = [other for other in dict.fromkeys([*needed, *more]) if other != name]
            if name in _ENCODED and "decoder_input_ids" in parameters and "decoder_input_ids" not in others:
                others.append("decoder_input_ids")
            yield from _fill([name, *others], config)
    if needed and not any(name in parameters for name in _MAIN):
        yield from _fill(needed, config)


# Arguments that some models need although the arguments have a default.
_COMPANIONS: tuple[list[str], ...] = (
    [],
    *(["bbox"], ["pixel_values"], ["input_features"], ["input_values"], ["attention_mask"], ["input_features_mask"]),
    *(["encoder_hidden_states"], ["encoder_hidden_states", "encoder_attention_mask"], ["bbox", "pixel_values"]),
    *(["pixel_mask"], ["image_grid_thw"], ["image_position_ids"], ["pixel_position_ids"]),
    *(["spatial_shapes"], ["position_embeddings"]),
)
_ENCODED = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")
_MAIN = (
    *("input_ids", "pixel_values", "input_features", "input_values", "inputs_embeds", "hidden_states"),
    *("pixel_values_videos", "past_values", "audio_values", "inputs"),
)


def _fill(names: list[str], config: Any) -> Iterator[Inputs]:
    for values in itertools.product(*(_candidates(name, config) for name in names)):
        yield dict(zip(names, values, strict=True))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _ids(config: Any) -> Tensor:
    sizes = [value for value in _values(config, "vocab_size") if value > 0] or [32]
    high = max(6, min([*sizes, 100]) - 8)  # below the special tokens
    return torch.randint(5, high, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def _configs(config: Any) -> list[Any]:
    """Lists a config and its sub-configs, outermost first."""
    inner = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(part for value in inner for part in _configs(value))]


def _values(config: Any, *names: str) -> list[int]:
    """Lists the values of fields in a config and its sub-configs, outermost first, one field after another."""
    found = [getattr(part, name, None) for name in names for part in _configs(config)]
    return [value for value in found if isinstance(value, int) and not isinstance(value, bool)]


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    return [*_values(config, *names), default][0]


def _width(config: Any) -> list[int]:
    names = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_hidden_size", "decoder_hidden_size")
    return list(dict.fromkeys(_values(config, *names)))[:4] or [64]


def _image_sizes(config: Any) -> list[tuple[int, ...]]:
    own = [getattr(part, "image_size", None) for part in _configs(config)]
    sizes = [(v, v) if isinstance(v, int) else tuple(v) for v in own if isinstance(v, int | list | tuple)]
    return list(dict.fromkeys([*(s for s in sizes if len(s) == 2), (64, 64), (224, 224)]))


def _candidates(name: str, config: Any) -> list[Any]:
    """Lists values that an argument may take, the likeliest first."""
    if name in ("input_ids", "decoder_input_ids", "text_input_ids"):
        books = [v for v in _values(config, "num_codebooks", "num_quantizers", "num_channels") if v > 3][:1]
        several = [_ids(config).unsqueeze(-1).expand(-1, -1, n).contiguous() for n in books]
        short = [_ids(config)[:, :16]] if _first(config, ("max_position_embeddings",), 512) < LENGTH else []
        return [*short, _ids(config), *several]
    if "pixel_values" in name or name in ("images", "image", "pixel_features"):
        channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
        images = [_normal(BATCH, channels, *size) for size in _image_sizes(config)]
        frames = _first(config, ("num_frames", "frames_per_clip"), 2)
        videos = [_normal(BATCH, frames, channels, *size) for size in _image_sizes(config)[:2]]
        patch = _first(config, ("patch_size",), 4)
        flat = [_normal(32, channels * patch * patch * n) for n in (1, 2)]
        if "video" in name:
            return [*videos, *images]
        return [*images, *videos, *flat, _normal(BATCH, 32, channels * patch**2)]
    if name == "input_features":
        mels = _values(config, "num_mel_bins", "feature_size", "n_mels", "input_size")
        mels = list(dict.fromkeys([*mels, 80, 128]))
        long = 2 * _first(config, ("max_source_positions",), 48)
        return [
            _normal(*s) for m in mels for s in ((BATCH, m, long), (BATCH, 96, m), (BATCH, m, 96), (BATCH, 1, 96, m))
        ]
    if name in ("input_values", "audio_values", "input_audio"):
        shapes = [(BATCH, 4000), (BATCH, 1, 4000), (BATCH, 80, 96), (BATCH, 96, 80), (BATCH, 1, 128, 128)]
        if mels := _values(config, "num_mel_bins"):
            shapes.insert(0, (BATCH, _first(config, ("max_length",), 96), mels[0]))
        return [_normal(*s) for s in shapes]
    if name in ("codebook_idx", "prefix_length"):
        return [2 if name == "codebook_idx" else 4]
    if name in _HIDDEN or name.endswith("_hidden_states"):
        patch, channels = _first(config, ("patch_size",), 14), _first(config, ("in_channels", "num_channels"), 3)
        times = _first(config, ("temporal_patch_size",), 1)
        flat = [_normal(32, times * channels * patch**2)] if name == "hidden_states" else []
        return [*(_normal(BATCH, LENGTH, width) for width in _width(config)), *flat]
    if name.endswith("mask"):
        sides = [torch.ones(BATCH, *size, dtype=torch.long) for size in _image_sizes(config)]
        lengths = [torch.ones(BATCH, n, dtype=torch.long) for n in (LENGTH, 96)]
        return sides if name == "pixel_mask" else [*lengths, lengths[1].bool()]
    if name == "bbox":
        return [torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)]
    if name.endswith("grid_thw"):
        return [torch.tensor([[1, 4, 8]]), torch.tensor([[1, 8, 4]])]
    if name == "past_values":
        length, channels = _first(config, ("context_length",), 64), _first(config, _CHANNELS, 1)
        sizes = ((length, channels), (length, 1), (64, 1))
        return [_normal(BATCH, n) if c == 1 else _normal(BATCH, n, c) for n, c in sizes]
    if name == "position_ids":
        return [torch.arange(LENGTH).expand(BATCH, -1)]
    return []


_CHANNELS = ("num_input_channels", "input_size")
_HIDDEN = ("inputs_embeds", "hidden_states", "inputs", "embeddings", "input_embeds", "query_embeds", "x")


def padded(inputs: Inputs, side: str) -> Inputs | None:
    """Gives text inputs with eight padded tokens in the second row, or with a mask of "ones"; None for others."""
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or "pixel_values" in inputs:
        return None
    mask, hidden = torch.ones_like(ids), {"left": slice(8), "right": slice(-8, None)}
    mask[1, hidden.get(side, slice(0))] = 0
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
