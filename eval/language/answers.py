"""Answers of a model: it reads a document once, and continues from a copy of its cache for every question."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from favor.eval.language.documents import Document, Prompt
from favor.eval.language.variants import Variant

# Tokens read at a time. Local layers then hold the mask of a piece and not that of the whole document, which saves most
# of the memory and time of a long one.
PIECE = 2048


@torch.no_grad()
def answer(model: Any, tokenizer: Any, variant: Variant, document: Document) -> dict[str, Any]:
    """Generates all answers of a document, greedy and token by token.

    Args:
        model: a causal language model; its attention is switched.
        tokenizer: that of the model.
        variant: attention and cache.
        document: a document with its prompts.

    Returns:
        "seconds" of the document and of all answers, and "answers": for each question its task, depth, generated text,
        "score" (the fraction of the expected parts that it contains, more is better) and "nats" (per token of the
        target, given earlier tokens, less is better).
    """
    variant.apply(model)
    cache, start = variant.new_cache(model), time.perf_counter()
    _read(model, cache, [document.ids])
    read = time.perf_counter()
    found = []
    for prompt in document.prompts:
        tokens, nats = _go_on(model, copy.deepcopy(cache), prompt)
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


def _go_on(model: Any, cache: Any, prompt: Prompt) -> tuple[list[int], list[float]]:
    """Continues a prompt by as many tokens as its target has, and reads the target too: a batch of two.

    Args:
        model: a causal language model.
        cache: that of the document; it is changed.
        prompt: the question.

    Returns:
        The tokens that the model chose, and the nats of the target's tokens.
    """
    logits = _read(model, cache, [prompt.ids])
    cache.batch_repeat_interleave(2)
    said, nats = [], []
    for place, wanted in enumerate(prompt.target):
        said.append(int(logits[0].argmax()))
        nats.append(-float(logits[-1].log_softmax(-1)[wanted]))
        if place + 1 < len(prompt.target):
            logits = _read(model, cache, [[said[-1]], [wanted]])
    return said, nats


def _read(model: Any, cache: Any, ids: list[list[int]]) -> torch.Tensor:
    """Reads some more tokens; gives the logits after the last one, `[batch, vocabulary]`.

    Args:
        model: a causal language model.
        cache: of earlier tokens; it is changed.
        ids: tokens `[batch, n]`.
    """
    for piece in torch.tensor(ids, device=model.device).split(PIECE, 1):
        logits = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float()
