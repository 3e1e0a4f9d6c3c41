"""Fields of configs for which the rules of `tiny` are wrong, or that have no default, by family or model class."""

from __future__ import annotations

from typing import Any

_SERIES = {"prediction_length": 8, "context_length": 24, "lags_sequence": [1, 2, 3]}
_HEADS = {"head_dim": 16}

OWN: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "aya_vision": {"vision_config.num_attention_heads": 8},
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS,
    "ministral": _HEADS,
    "hunyuan_vl": {**_HEADS, "text_config.head_dim": 16},
    "nemotron": {"num_key_value_heads": 8},
    "vivit": {"num_frames": 8},  # at 32 there are more than 2048 keys
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "bros": {"dim_bbox_sinusoid_emb_2d": 48, "dim_bbox_sinusoid_emb_1d": 12, "dim_bbox_projection": 8},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "emu3": {"vocabulary_map": {"<image>": 100}},
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
