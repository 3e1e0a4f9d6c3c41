"""How a model answers: it reads a document once, and goes on from a copy of its cache for every question."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import Cache

from favor.eval.language.documents import Document, Prompt
from favor.eval.language.variants import Variant


@torch.no_grad()
def answer(model: Any, tokenizer: Any, variant: Variant, document: Document) -> dict[str, Any]:
    """Generates all answers of a document, greedy and token by token.

    Args:
        model: a causal language model; its attention is switched.
        tokenizer: of the model.
        variant: attention and cache.
        document: with its prompts.

    Returns:
        "seconds" of the document and of all answers, and "answers": of each question its task, depth, generated text,
        "score" (the share of what should be in it) and "nats" (of a token of the target, given the ones before).
    """
    variant.apply(model)
    cache, start = variant.new_cache(model), time.perf_counter()
    _read(model, cache, document.ids)
    read = time.perf_counter()
    found = []
    for prompt in document.prompts:
        tokens, nats = _go_on(model, copy.deepcopy(cache), prompt)
        if tokens != prompt.target:
            _, nats = _go_on(model, copy.deepcopy(cache), prompt, forced=True)
        text, question = tokenizer.decode(tokens), prompt.question
        score = sum(part in text for part in question.answers) / len(question.answers)
        found.append(
            {
                "task": question.task,
                "depth": question.depth,
                "text": text,
                "score": score,
                "nats": sum(nats) / len(nats),
            }
        )
    return {"seconds": [read - start, time.perf_counter() - read], "answers": found}


def _go_on(model: Any, cache: Cache, prompt: Prompt, forced: bool = False) -> tuple[list[int], list[float]]:
    """Continues a prompt by as many tokens as the target has, or by the target itself; gives tokens and their nats."""
    tokens, nats = [], []
    logits = _read(model, cache, prompt.ids)
    for place, wanted in enumerate(prompt.target):
        token = wanted if forced else int(logits.argmax())
        tokens.append(token)
        nats.append(-float(logits.log_softmax(-1)[token]))
        if place + 1 < len(prompt.target):
            logits = _read(model, cache, [token])
    return tokens, nats


def _read(model: Any, cache: Cache, ids: list[int]) -> torch.Tensor:
    """Logits after some more tokens, `[vocabulary]`; those of other places are not computed."""
    inputs = torch.tensor([ids], device=model.device)
    out = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float()
