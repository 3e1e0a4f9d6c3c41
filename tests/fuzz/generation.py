"""Generation by tiny models with a `FavorCache`: the tokens and logits of a run without a cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.utils import logging

import favor

logging.set_verbosity_error()
_SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
_GROUPED = {"num_key_value_heads": 2, "intermediate_size": 32}
_LOCAL = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES, **_GROUPED),
    "qwen2": lambda: Qwen2Config(**_SIZES, **_GROUPED),
    "gpt2": lambda: GPT2Config(**_SIZES, n_positions=512),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, **_GROUPED, **_LOCAL),
}
# (backend, features)
FAMILIES = (("favor+", None), ("landmark", None), ("favor#", "wderf"), ("favor#", "sderf"), ("favor++", None))
WAYS = ("pieces", "greedy", "beams", "samples", "conversation")
_TOLERANCE = {"float64": 1e-6, "float32": 5e-3, "bfloat16": 0.3}


@dataclass(frozen=True)
class Generation:
    """One run; every default is the simplest value.

    Attributes:
        lengths: real tokens of each row of the batch, which is padded at the left.
        pieces: into how many pieces the prompt is cut; of "pieces" only.
        steepness: factor of the keys, whose logits and features it makes large.
    """

    model: str = "llama"
    family: tuple[str, str | None] = ("favor+", None)
    way: str = "pieces"
    lengths: tuple[int, ...] = (5,)
    pieces: int = 1
    num_features: int = 8
    window: int = 0
    new_tokens: int = 2
    steepness: float = 1.0
    dtype: str = "float64"
    seed: int = 0


def draw(choose: Callable[[Sequence[Any]], Any]) -> Generation:
    """A run; `choose` takes one of several values."""
    way, longest = choose(WAYS), choose((5, 9, 17, 40, 70, 130, 140))
    rows = choose((1, 2, 3))
    return Generation(
        model=choose(tuple(MODELS)),
        family=choose(FAMILIES),
        way=way,
        lengths=tuple(choose((longest, longest, 1, 2, longest // 2, max(longest - 68, 1))) for _ in range(rows)),
        pieces=choose((2, 3, 5, 1)),
        num_features=choose((8, 2, 5, 16)),
        window=choose((0, 0, 4, 7, 16)),
        new_tokens=choose((2, 3, 9)),
        steepness=choose((1.0, 1.0, 5.0, 30.0)),
        dtype=choose(("float64", "float32", "bfloat16")) if way == "pieces" else "float64",  # no ties
        seed=choose(range(1000)),
    )


def check(call: Generation) -> bool:
    """Runs the model with and without a cache.

    Raises:
        AssertionError: saying what differs. Any other error is one of the library.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", ".*parameters from this sequence")
        model, inputs = _model(call), _prompt(call)
        {"pieces": _check_pieces, "conversation": _check_conversation}.get(call.way, _check_generate)(
            call, model, inputs
        )
    return True


def _model(call: Generation) -> PreTrainedModel:
    torch.manual_seed(call.seed)
    model = AutoModelForCausalLM.from_config(MODELS[call.model]()).eval().to(getattr(torch, call.dtype))
    for name, parameter in model.named_parameters():
        if "k_proj" in name:
            parameter.copy_(call.steepness * (parameter if parameter.ndim > 1 else torch.randn_like(parameter)))
    backend, features = call.family
    named = {} if features is None else {"features": features}
    sizes = {"num_features": call.num_features, "window": call.window, "exact_below": 0}
    return favor.configure(model, backend, **named, **sizes)


def _prompt(call: Generation) -> dict[str, Tensor]:
    longest = max(call.lengths)
    ids = torch.randint(3, 40, (len(call.lengths), longest), generator=torch.Generator().manual_seed(call.seed))
    mask = torch.arange(longest) >= longest - torch.tensor(call.lengths).unsqueeze(1)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


def _check_pieces(call: Generation, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    places, cache, length = (mask.cumsum(1) - 1).clamp(min=0), favor.FavorCache(model.config), ids.shape[1]
    expected = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    cuts = sorted({length * i // call.pieces for i in range(call.pieces + 1)})
    outs = []
    for start, stop in pairwise(cuts):
        now = {"attention_mask": mask[:, :stop], "position_ids": places[:, start:stop]}
        outs.append(model(ids[:, start:stop], **now, past_key_values=cache).logits)
    _close(call, torch.cat(outs, 1)[mask.bool()], expected[mask.bool()])


def _check_generate(call: Generation, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    options = {"beams": {"num_beams": 3}, "samples": {"do_sample": True, "num_return_sequences": 2}}.get(call.way, {})
    runs = []
    for cache in ({"use_cache": False}, {"past_key_values": favor.FavorCache(model.config)}):
        torch.manual_seed(call.seed)
        runs.append(_generate(call, model, inputs, **cache, **options))
    _compare(call, *runs)


def _check_conversation(call: Generation, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    cache = favor.FavorCache(model.config)
    said = _generate(call, model, inputs, past_key_values=cache).sequences
    ids = torch.cat([said, said[:, -3:].flip(1)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, inputs["input_ids"].shape[1] :])], 1)
    more = {"input_ids": ids, "attention_mask": mask}
    _compare(call, _generate(call, model, more, use_cache=False), _generate(call, model, more, past_key_values=cache))


def _generate(call: Generation, model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    length = {"max_new_tokens": call.new_tokens, "min_new_tokens": call.new_tokens}
    return model.generate(
        **inputs, **{"do_sample": False, **length, **options}, output_logits=True, return_dict_in_generate=True
    )


def _compare(call: Generation, expected: Any, found: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences), "other tokens than without a cache"
    _close(call, torch.stack(found.logits), torch.stack(expected.logits))


def _close(call: Generation, found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all(), "logits are not finite"
    if call.dtype == "float64" or call.steepness == 1:
        largest = (found - expected).abs().max().item()
        assert largest <= _TOLERANCE[call.dtype] * max(1.0, expected.abs().max().item()), (
            f"logits differ by {largest:.3g}"
        )
