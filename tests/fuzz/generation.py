"""Generation by tiny models with a `FavorCache`: the tokens and logits of a run without a cache.

Of the way "steps" each step changes the cache, as a caller may: it reads tokens, forgets some, reorders, chooses or
repeats its rows, or goes on with a copy.
"""

from __future__ import annotations

import copy
import pickle
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
SELECTED = (8, 4, 12, 16, 9, 64, 1, 0)
STEPS = ("read", "read", "read", "forget", "forget", "leave", "reorder", "select", "repeat", "copy", "pickle")
_TOLERANCE = {"float64": 1e-6, "float32": 5e-3, "bfloat16": 0.3}


@dataclass(frozen=True)
class Generation:
    """One run; every default is the simplest value."""

    model: str = "llama"
    family: tuple[str, str | None] = ("favor+", None)
    way: str = "pieces"
    lengths: tuple[int, ...] = (5,)  # real tokens of each row of the batch, which is padded at the left
    pieces: int = 1  # of the prompt
    num_features: int = 8
    window: int = 0
    new_tokens: int = 2
    steepness: float = 1.0  # factor of the keys, whose logits and features it makes large
    dtype: str = "float64"
    seed: int = 0
    selected: int = 8
    steps: tuple[tuple[str, int], ...] = ()  # after the prompt, each with a number of tokens, rows or repetitions


def draw(choose: Callable[[Sequence[Any]], Any]) -> Generation:
    """A run; `choose` takes one of several values."""
    way, longest, rows = choose(WAYS), choose((5, 9, 17, 40, 70, 130, 140)), choose((1, 2, 3))
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
        selected=choose(SELECTED),
    )


def draw_steps(choose: Callable[[Sequence[Any]], Any]) -> Generation:
    """A run of steps. Blocks are short, so that a few tokens complete them."""
    longest = choose((30, 5, 18, 41, 1))
    family = choose((("landmark", None), ("landmark", None), ("landmark", None), ("favor+", None), ("favor#", "wderf")))
    is_padded = choose((False, True))
    return Generation(
        model=choose(("llama", "gpt2")),
        family=family,
        way="steps",
        lengths=tuple(choose((longest, 1, longest // 2 + 1)) if is_padded else longest for _ in range(choose((1, 2)))),
        num_features=choose((5, 2, 8)),
        window=choose((4, 7, 8)),
        seed=choose(range(1000)),
        selected=choose(SELECTED),
        steps=tuple((choose(STEPS), choose((1, 1, 1, 2, 1, 3, 5, 12, 40))) for _ in range(choose((8, 12, 16)))),
    )


def check(call: Generation) -> None:
    """Runs the model with and without a cache; an AssertionError says what differs."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", ".*parameters from this sequence")
        model, inputs = _model(call), _prompt(call)
        checks = {"pieces": _check_pieces, "conversation": _check_conversation, "steps": _check_steps}
        checks.get(call.way, _check_generate)(call, model, inputs)


def _model(call: Generation) -> PreTrainedModel:
    torch.manual_seed(call.seed)
    model = AutoModelForCausalLM.from_config(MODELS[call.model]()).eval().to(getattr(torch, call.dtype))
    for name, parameter in model.named_parameters():
        if "k_proj" in name:
            parameter.copy_(call.steepness * (parameter if parameter.ndim > 1 else torch.randn_like(parameter)))
    backend, features = call.family
    named = {} if features is None else {"features": features}
    sizes = {"selected_keys": call.selected} if backend == "landmark" else {"window": call.window}
    return favor.configure(model, backend, num_features=call.num_features, exact_below=0, **named, **sizes)


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


@dataclass
class _Tokens:
    """The tokens `[B, T]` that a cache holds, and how many of the last ones it can forget if it keeps all keys."""

    ids: Tensor
    mask: Tensor
    is_kept: bool

    @property
    def places(self) -> Tensor:
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    @property
    def can_forget(self) -> int:
        return self.is_kept * int(self.mask.all(0).flip(0).long().cumprod(0).sum())

    def read(self, ids: Tensor) -> None:
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, torch.ones_like(ids)], 1)

    def forget(self, number: int) -> None:
        left = self.ids.shape[1] - number
        self.ids, self.mask = self.ids[:, :left], self.mask[:, :left]

    def rows(self, index: Tensor) -> None:
        self.ids, self.mask = self.ids[index], self.mask[index]


def _check_steps(call: Generation, model: PreTrainedModel, inputs: dict[str, Tensor]) -> None:
    cache, generator = favor.FavorCache(model.config), torch.Generator().manual_seed(call.seed)
    tokens = _Tokens(*inputs.values(), is_kept=call.family[0] == "landmark")
    _check_read(call, model, cache, tokens, tokens.ids.shape[1])
    for step, number in call.steps:
        rows = len(tokens.ids)
        if step == "read":
            tokens.read(torch.randint(3, 40, (rows, number), generator=generator))
            _check_read(call, model, cache, tokens, number)
        elif step in ("forget", "leave"):
            length, number = tokens.ids.shape[1], number % (tokens.can_forget + 2)  # one more than is possible, too
            _check_crop(cache, tokens, -number if step == "forget" else length - number or length + 5)
        elif step in ("reorder", "select"):
            index = torch.randint(rows, (min(number, 3),), generator=generator)
            index = torch.randperm(rows, generator=generator) if step == "reorder" else index
            (cache.reorder_cache if step == "reorder" else cache.batch_select_indices)(index)
            tokens.rows(index)
        elif step == "repeat" and rows * number <= 6:
            cache.batch_repeat_interleave(number)
            tokens.rows(torch.arange(rows).repeat_interleave(number))
        elif step in ("copy", "pickle"):
            earlier, cache = cache, copy.deepcopy(cache) if step == "copy" else pickle.loads(pickle.dumps(cache))
            model(torch.full((rows, 1), 7), past_key_values=earlier)  # what becomes of it does not matter
        assert cache.get_seq_length() == tokens.ids.shape[1], f"a cache of {cache.get_seq_length()} tokens"


def _check_read(
    call: Generation, model: PreTrainedModel, cache: favor.FavorCache, tokens: _Tokens, number: int
) -> None:
    given = {"attention_mask": tokens.mask, "position_ids": tokens.places}
    expected = model(tokens.ids, **given, use_cache=False).logits[:, -number:]
    given["position_ids"] = tokens.places[:, -number:]
    with torch.inference_mode() if number % 2 else torch.no_grad():  # what the one makes is used by the other
        found = model(tokens.ids[:, -number:], **given, past_key_values=cache).logits
    real = tokens.mask[:, -number:].bool()
    _close(call, found[real], expected[real])


def _check_crop(cache: favor.FavorCache, tokens: _Tokens, number: int) -> None:
    forgotten = max(tokens.ids.shape[1] - number, 0) if number > 0 else -number
    try:
        cache.crop(number)
    except ValueError:
        assert forgotten > tokens.can_forget, f"{forgotten} of {tokens.can_forget} tokens are not forgotten"
        return
    assert forgotten <= tokens.can_forget, f"{forgotten} tokens are forgotten, and {tokens.can_forget} can be"
    tokens.forget(forgotten)


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
