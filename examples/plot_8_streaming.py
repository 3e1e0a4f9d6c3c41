"""
Speech piece by piece
=====================

A causal Conformer takes audio piece by piece. With linear attention its state does not grow,
and its output is the same as for the whole recording at once.

The model has random weights, because this page is about cost and not about words.
"""

import matplotlib.pyplot as plt
import torch

from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC

RATE, SECONDS, PIECE = 16000, 30, 0.5
torch.manual_seed(0)
audio = 0.1 * torch.randn(RATE * SECONDS)
extractor = ConformerFeatureExtractor(normalize="none")


def make(attention):
    """A causal recogniser with random weights, the same for both kinds of attention."""
    torch.manual_seed(0)
    config = ConformerConfig.preset("tiny", causal=True, attn_implementation=attention)
    config.favor = {**(config.favor or {}), "exact_below": 0, "num_features": 64}
    return ConformerForCTC(config).eval()


def stream(model):
    """Logits of the recording piece by piece, and the bytes that are kept after each piece."""
    running, logits, kept = model.stream(extractor), [], []
    for piece in audio.split(int(RATE * PIECE)):
        logits.append(running.feed(piece))
        kept.append(running.state_bytes)
    return torch.cat(logits, dim=1), kept, running.latency


# %%
# The logits of the pieces and of the whole recording are the same up to rounding.

linear = make("favor+")
pieces, kept, latency = stream(linear)
with torch.no_grad():
    inputs = extractor(audio.numpy(), sampling_rate=RATE, return_tensors="pt")
    whole = linear(**inputs).logits
print(f"frames: {pieces.shape[1]} in pieces, {whole.shape[1]} at once")
print(f"largest difference of the logits: {(pieces - whole[:, : pieces.shape[1]]).abs().max():.1e}")
print(f"a frame can be computed {1000 * latency:.0f} ms after it begins")

# %%
# Exact attention keeps all keys and values of the past.

_, kept_exact, _ = stream(make("sdpa"))
seconds = [PIECE * (number + 1) for number in range(len(kept))]
figure, axis = plt.subplots(figsize=(6.5, 3.4))
axis.plot(seconds, [held / 1e6 for held in kept_exact], label="exact attention")
axis.plot(seconds, [held / 1e6 for held in kept], label="favor+, M = 64")
axis.set(xlabel="seconds of audio", ylabel="MB kept between pieces", ylim=(0, None))
axis.legend()
figure.tight_layout()
plt.show()
print(f"after {SECONDS} seconds: exact {kept_exact[-1] / 1e6:.2f} MB, favor+ {kept[-1] / 1e6:.2f} MB")
