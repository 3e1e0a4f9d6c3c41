"""Span corruption of bytes, and a small T5 that learns it with exact attention.

As for T5 (Raffel et al., 2020) 15 % of the tokens are hidden, and as for ByT5 (Xue et al., 2022) in spans of 20 bytes
on average. The first of the marks of a sequence is drawn, so that long sequences have none that training did not have.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from favor.train.text.samples import read_text

# The rate of the biases of distances is their own: they begin near 0, and must become some units large.
SEED, RATE, RATE_OF_BIASES, WARMUP = 0, 2e-3, 5e-2, 30
# All that adds to the hidden states begins smaller than in T5, which would take long to forget its own tokens.
WRITERS, SMALLER = ("shared.weight", ".o.weight", ".wo.weight"), 0.05
# Tokens as in ByT5: padding, the end, one more, the bytes, and what stands for hidden spans.
END, FIRST_BYTE, FIRST_SENTINEL, SENTINELS = 1, 3, 259, 80
HIDDEN, SPAN = 0.15, 20  # share of hidden bytes, and mean bytes of a span
SHAPE: dict[str, Any] = {"d_model": 192, "d_kv": 48, "num_heads": 4, "d_ff": 512, "dropout_rate": 0.0}
SHAPE |= {"num_layers": 4, "num_decoder_layers": 2, "decoder_start_token_id": 0}
SHAPE |= {"tie_word_embeddings": False}  # tied, but logits are not scaled, as in T5 1.1
BIASES = "relative_attention_bias"
# Tokens of the encoder, sequences of a batch, steps, share of hidden bytes. Half of the bytes are hidden first, as UL2
# does (Tay et al., 2022): then a step has many labels. Biases of distances learn in the first stage alone: without
# their gradients SDPA keeps no L x L logits.
STAGES = ((192, 16, 2500, 0.5), (512, 4, 500, HIDDEN), (2048, 1, 150, HIDDEN))


def read_bytes(path: Path) -> Tensor:
    """Reads a text as tokens `[n]`, one for each byte."""
    return torch.frombuffer(bytearray(read_text(path).encode()), dtype=torch.uint8).long() + FIRST_BYTE


def corrupted_length(length: int, share: float = HIDDEN) -> tuple[int, int, int]:
    """Gives how many of `length` bytes are hidden, in how many spans, and the tokens that the encoder reads."""
    hidden = round(share * length)
    spans = max(1, round(hidden / SPAN))
    return hidden, spans, length - hidden + spans + 1


def corrupt(ids: Tensor, generator: torch.Generator, share: float = HIDDEN) -> tuple[Tensor, Tensor]:
    """Hides spans of tokens `[n]`: gives what the encoder reads and what the decoder shall write."""
    hidden, spans, _ = corrupted_length(len(ids), share)

    def parts(total: int) -> list[int]:
        cuts = (torch.randperm(total - 1, generator=generator)[: spans - 1] + 1).sort().values.tolist()
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]

    first, place = int(torch.randint(SENTINELS, (), generator=generator)), 0
    inputs, labels = [], []
    for number, (kept, lost) in enumerate(zip(parts(len(ids) - hidden), parts(hidden), strict=True)):
        mark = ids.new_tensor([FIRST_SENTINEL + (first + number) % SENTINELS])
        inputs += [ids[place : place + kept], mark]
        labels += [mark, ids[place + kept : place + kept + lost]]
        place += kept + lost
    return torch.cat([*inputs, ids.new_tensor([END])]), torch.cat([*labels, ids.new_tensor([END])])


def bytes_of(tokens: int, share: float = HIDDEN) -> int:
    """Gives how many bytes make so many tokens of the encoder, or one less."""
    return max(length for length in range(tokens, 3 * tokens) if corrupted_length(length, share)[2] <= tokens)


def train(text: Tensor) -> T5ForConditionalGeneration:
    """Trains a T5 with exact attention, on sequences of random places."""
    torch.manual_seed(SEED)
    vocabulary = FIRST_SENTINEL + SENTINELS
    model = T5ForConditionalGeneration(T5Config(**SHAPE, vocab_size=vocabulary))
    model.set_attn_implementation("sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith(WRITERS):
            parameter.data.mul_(SMALLER)
    generator, total = torch.Generator().manual_seed(SEED), sum(steps for _, _, steps, _ in STAGES)
    rates = {name: RATE_OF_BIASES if BIASES in name else RATE for name, _ in model.named_parameters()}
    groups = [{"params": [own], "lr": rates[name]} for name, own in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    pace = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / WARMUP, 1 - n / total))
    for number, (tokens, batch, steps, share) in enumerate(STAGES):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(number == 0 or BIASES not in name)
        width, losses = bytes_of(tokens, share), []
        for step in range(1, steps + 1):
            places = torch.randint(len(text) - width, (batch,), generator=generator).tolist()
            pairs = [corrupt(text[place : place + width], generator, share) for place in places]
            inputs, labels = (torch.stack(own) for own in zip(*pairs, strict=True))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=inputs, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            pace.step()
            losses.append(loss.item())
            if step % 25 == 0 or step == steps:
                print(f"{tokens} tokens, step {step}: loss {statistics.fmean(losses[-25:]):.4f}", flush=True)
    return model.eval()
