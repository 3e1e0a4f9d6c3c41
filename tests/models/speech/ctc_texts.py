"""Logits that say one text, and all texts that logits can say."""

import itertools

import torch


def sure_logits(labels, *tokens):
    """Logits `[1, 2 n, labels]` that say n tokens, with a blank after each."""
    logits = torch.full((1, 2 * len(tokens), labels), -30.0)
    logits[0, 1::2, 0] = logits[0, range(0, 2 * len(tokens), 2), tokens] = 0.0
    return logits


def all_texts(logits):
    """Every text that the frames `[L, V]` can say, with its CTC log probability."""
    frames, labels = logits.shape
    log_probs = logits.double().log_softmax(-1)[:, None]
    for count in range(frames + 1):
        for text in itertools.product(range(1, labels), repeat=count):
            target = torch.tensor([text], dtype=torch.long)
            loss = torch.nn.functional.ctc_loss(log_probs, target, [frames], [count], reduction="none")
            if loss < 1e9:
                yield text, -float(loss)
