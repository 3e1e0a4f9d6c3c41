"""Errors of the heads of a real model, and its perplexity, with each form."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import favor
from favor.eval.approximation import model as whole
from favor.eval.common import report
from favor.eval.common.pretrained import minilm_path
from favor.eval.forms.form import (
    CAUSAL_FORMS,
    ENCODER_FORMS,
    SECTION,
    Form,
    attend,
    causal_parts,
    counted,
    encoder_parts,
    take,
)
from favor.eval.language import models as language
from favor.eval.language.perplexity import token_nats
from favor.eval.options.forms import NAME, parse_arguments
from favor.integrations.adapt.observe import Observation, observe, relative_error
from favor.train.common.program import program
from favor.train.text.samples import samples

EXPLAINED = (
    "Relative error of the attention output of each head, on blocks of queries drawn at random (causal: of the second "
    "half); less is better. Search and attention: products of two vectors for each query, counted. Layers with a "
    "sliding window are left out. Perplexity: how much greater it is than with exact attention."
)
# Those whose perplexity is measured, which takes minutes each.
MEASURED = (
    "1,024 keys of the block, 64 of each query",
    "512 keys of the block",
    "32 of each query",
    "none of each query",
    "coordinates of a key head",
)
BACKEND, EXACT = "the backend landmark", "exact"
FORM = "favor_form"


def chosen_blocks(first: int, last: int, block: int, number: int) -> list[int]:
    """Draws the first queries of some blocks between two places, always the same ones."""
    drawn = torch.randperm((last - first) // block, generator=torch.Generator().manual_seed(0))[:number]
    return (first + drawn * block).tolist()


class Errors:
    """Measures relative errors of heads on some blocks, as a callback of `favor.integrations.adapt.observe.observe`.

    Args:
        number: blocks of 64 queries, or as many queries in blocks of another size, that are measured in each layer.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.errors: dict[str, list[Tensor]] = {}
        self.read: dict[str, list[float]] = {}

    @torch.no_grad()
    def __call__(self, seen: Observation) -> None:
        """Adds the heads of one layer; layers with a sliding window are not counted."""
        if getattr(seen.module, "is_sliding", False):
            return
        query, key, value = seen.query[0], seen.key[0], seen.value[0]
        parts_of, forms, first = (
            (causal_parts, CAUSAL_FORMS, query.shape[1] // 2) if seen.is_causal else (encoder_parts, ENCODER_FORMS, 0)
        )
        for name, form in forms.items():
            starts = chosen_blocks(first, query.shape[1], form.block, self.number * 64 // form.block)
            found = [
                (*attend(form, part, seen.scale), part.places) for part in parts_of(form, query, key, value, starts)
            ]
            self._add(name, seen, [(output, places) for output, _, places in found])
            self.read.setdefault(name, []).extend(read for _, read, _ in found)
        options: dict[str, Any] = {"features": "landmark", "scale": seen.scale, "is_causal": seen.is_causal}
        output = favor.favor_attention(seen.query, seen.key, seen.value, **options)[0]
        rows = chosen_blocks(first, query.shape[1], 64, self.number)
        places = torch.cat([torch.arange(start, start + 64) for start in rows]).expand(len(query), -1)
        self._add(BACKEND, seen, [(take(output, places), places)])

    def _add(self, name: str, seen: Observation, found: Sequence[tuple[Tensor, Tensor]]) -> None:
        output = torch.cat([rows for rows, _ in found], 1)
        exact = take(seen.output[0], torch.cat([places for _, places in found], 1))
        rows = seen._replace(output=exact[None], padding=None)  # a sample has no padding
        self.errors.setdefault(name, []).append(relative_error(output[None], rows)[0])


@torch.no_grad()
def measure(model: Any, sample: Tensor, number: int) -> Errors:
    """Measures all forms on a model that reads text, on one sample `[1, L]` and a number of blocks of 64 queries."""
    errors = Errors(number)
    with observe(model, errors):
        model(**whole.text_inputs(model, sample))
    return errors


@torch.no_grad()
def perplexities(model: Any, rows: Tensor) -> dict[str, float]:
    """Gives the perplexity of a decoder on samples `[n, L]` by form, with exact attention and with the backend."""
    form: Form | None = None

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        if form is None or getattr(module, "is_sliding", False):
            return sdpa_attention_forward(module, query, key, value, mask, **given)
        own = slice(SECTION)
        before, _ = sdpa_attention_forward(module, query[:, :, own], key[:, :, own], value[:, :, own], None, **given)
        parts = causal_parts(form, query[0], key[0], value[0], range(SECTION, query.shape[2], form.block))
        rest = [attend(form, part, given["scaling"])[0] for part in parts]
        return torch.cat([before, torch.cat(rest, 1).transpose(0, 1)[None]], 1), None

    AttentionInterface.register(FORM, attention)
    AttentionMaskInterface.register(FORM, sdpa_mask)
    model.set_attn_implementation(FORM)
    found = {EXACT: perplexity(model, rows)}
    for name in MEASURED:
        form = CAUSAL_FORMS[name]  # read by `attention`
        found[name] = perplexity(model, rows)
    favor.configure(model, "landmark", exact_below=0)
    return {**found, BACKEND: perplexity(model, rows)}


def perplexity(model: Any, rows: Tensor) -> float:
    """Computes the perplexity of samples `[n, L]`."""
    return math.exp(torch.cat([token_nats(model, row) for row in rows.split(1)]).mean())


def table(found: Errors, length: int, losses: dict[str, float]) -> list[str]:
    """Writes the rows of one length."""
    is_causal = next(iter(CAUSAL_FORMS)) in found.errors
    forms, rows = CAUSAL_FORMS if is_causal else ENCODER_FORMS, []
    for name, layers in found.errors.items():
        errors, work, loss = torch.cat(layers), ["", ""], ""
        if name in forms:
            read = sum(found.read[name]) / len(found.read[name])
            work = [f"{count:,.0f}" for count in counted(forms[name], length, is_causal, read)]
        if name in losses:
            loss = f"{100 * (losses[name] / losses[EXACT] - 1):+.2f} %"
        figures = [f"{figure:.3f}" for figure in (errors.mean(), errors.quantile(0.9), errors.max())]
        rows.append([name, *figures, *work, *([loss] if losses else [])])
    exact = length if is_causal else 2 * length
    head = ["form", "mean error", "p90", "worst head", "search", f"attention (exact: {exact:,})"]
    return ["", f"## {length:,} tokens", "", *report.table([*head, *(["perplexity"] if losses else [])], rows)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all forms at all lengths, and writes the table."""
    arguments = parse_arguments(argv)
    words = list(argv if argv is not None else sys.argv[1:])
    if arguments.model == language.GEMMA:
        model, tokenizer = language.load(language.GEMMA)
    else:
        tokenizer, model = whole.load(arguments.model or str(minilm_path()), torch.device("cpu"))
    if arguments.samples and whole.measure_of(model) != "perplexity":
        raise ValueError(f"--samples: {type(model).__name__} has no perplexity, it is no causal language model")
    lines = [f"# Forms of landmark attention on {Path(arguments.model or 'MiniLM').name}", "", EXPLAINED]
    content: dict[str, Any] = {}
    for length in sorted(set(arguments.lengths)):
        found = measure(model, samples(arguments.text, tokenizer, length, 1, arguments.seed), arguments.blocks)
        losses = {}
        if arguments.samples:
            losses = perplexities(model, samples(arguments.text, tokenizer, length, arguments.samples, arguments.seed))
        errors = {form: torch.cat(own).tolist() for form, own in found.errors.items()}
        content[str(length)] = {"errors": errors, "perplexities": losses}
        lines += (rows := table(found, length, losses))
        print("\n".join(rows), flush=True)
    command = report.shown_command(NAME, report.local_names(words), [], ["--output_dir"])
    facts = {**report.context(command, ("transformers",)), "lengths": content}
    report.write(arguments.output_dir, arguments.name, lines, facts, [])
    return 0


cli = program(NAME, main)


if __name__ == "__main__":
    cli()
