"""Makes the config of a tiny model from any config class of transformers, by rules on the names of its fields.

All widths are divided by one number, so that widths that must fit still fit. One layer of each kind is kept, at least
two layers in all.
"""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
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
_EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_WIDTH = re.compile(
    r"hidden|dim$|dim_|_dim|d_model|d_inner|d_ff|d_kv|n_embd|n_inner|width|embed|rank|intermediate|ffn|channels|"
    r"inner|filters|proj|codevector|state_size|d_state|d_head|head_size|feature_size|nhid|_chn|linear"
)
_NOT_WIDTH = re.compile(
    r"kernel|vocab|layers|heads|num_|prob|token|_ids?$|index|image_|dropout|max_|chunk|window|length|ratio|factor|"
    r"act|stride|expand|position|groups|norm|query_dict"
)
_TOKEN = re.compile(r"token_id$|token_index$|_id$|_token$|_token_ids$")
_WINDOWS = ("sliding_window", "local_attention", "attention_window_size", "sliding_window_size")
_FIXED = {
    "n_group": 1,
    "num_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_feature_levels": None,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "use_timm_backbone": False,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_queries": 20,
    "num_denoising": 0,
    "train_num_points": 32,
    "dtype": "float32",
}


def shrink(config: PretrainedConfig, factor: int = 8, image: int | None = 4, own: dict[str, Any] | None = None) -> Any:
    """Gives a small copy of a config.

    Args:
        config: of any model, with its default values.
        factor: divisor of the widths.
        image: side of an image in patches; None keeps its size.
        own: fields for which the rules are wrong, by name; fields of sub-configs have dotted names.
    """
    small, own = copy.deepcopy(config), own or {}
    fields = {name: value for name, value in vars(small).items() if not name.startswith("__")}
    layers = _layer_numbers(fields)
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig) and value.model_type.startswith("timm_"):
            changed = _backbone()
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
        return value if _FIXED[name] is None else _FIXED[name]
    if isinstance(value, dict):
        return {key: _changed(str(key), v, factor, layers) for key, v in value.items()}
    if isinstance(value, list | tuple):
        if len(value) in layers and name not in ("depths",) and not name.startswith("_out"):
            value = type(value)(value[i] for i in layers[len(value)])
        if name == "depths":
            return type(value)(min(v, 2) for v in value)
        if value and all(isinstance(v, int) for v in value) and ("mrope" in name or _is_width(name)):
            return type(value)(_divided(v, factor) for v in value)
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name.endswith(("vocab_size", "_vocab")):
        return min(value, VOCABULARY)
    if name in _WINDOWS:
        return min(value, WINDOW)
    if _EXPERTS.match(name):
        return min(value, 4)
    if "experts_per_tok" in name or name in ("moe_topk", "moe_top_k", "moe_k"):
        return min(value, 2)
    if _is_layers(name) and value > 2:
        return len(layers.get(value, [0, 1]))
    if name in ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"):
        return min(value, 512)
    return _divided(value, factor) if _is_width(name) else value


def _is_width(name: str) -> bool:
    return bool(_WIDTH.search(name)) and not _NOT_WIDTH.search(name)


def _divided(value: int, factor: int) -> int:
    return value // factor if value >= 2 * factor and value % factor == 0 else value


def _shrink_image(config: Any, image: int | None) -> None:
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or not isinstance(size, int) or not isinstance(patch, int):
        return
    if size > image * patch:
        _set(config, "image_size", image * patch)


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
