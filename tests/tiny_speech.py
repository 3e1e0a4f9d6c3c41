"""A small corpus of sines, small untrained speech models, and logits whose texts are known."""

import itertools
import json
from importlib.util import find_spec

import numpy as np
import pytest
import soundfile
import torch

from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC, ConformerForTransducer
from favor.models.speech import ConformerProcessor, train_tokenizer

HAS_SEARCH = find_spec("flashlight") is not None
needs_search = pytest.mark.skipif(not HAS_SEARCH, reason="needs flashlight-text, of the extra lm")


RATE = 16000
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZES |= {"conv_kernel_size": 5, "subsampling_conv_channels": 16, "vocab_size": 12, "num_mel_bins": 10}
SIZES |= {"prediction_hidden_size": 8, "joint_hidden_size": 8}
# Features of a stream, which cannot know the mean of the whole.
FIXED = {"normalize": "none", "mean": [-3.0] * 10, "std": [2.0] * 10}
TEXTS = ("GO FIN", "HER EAR", "DO", "A BAT GO", "COT", "FIN DO A", "EAR")
SPLITS = {"train": (0.8, 1.1, 0.9, 1.3), "dev": (0.9, 1.4, 0.7), "test": (1.2, 0.6)}


def sound(seconds, seed=0, rate=RATE):
    """Sines of random frequencies and a little noise, `[n]` float32."""
    source = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * source.uniform(100, 3000) * time) for _ in range(3))
    return (0.2 * tones + 0.01 * source.normal(size=len(time))).astype(np.float32)


def write_corpus(folder):
    """Manifests train, dev and test of 4, 3 and 2 utterances."""
    for split, lengths in SPLITS.items():
        rows = []
        for number, seconds in enumerate(lengths):
            name = f"{split}{number}"
            soundfile.write(folder / f"{name}.wav", sound(seconds, len(rows) + len(split)), RATE)
            rows.append({"id": name, "audio": f"{name}.wav", "text": TEXTS[(number + len(split)) % len(TEXTS)]})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def build(kind, backend="sdpa", options=None, seed=0, **changes):
    """A Conformer with random weights; `options` are those of its attention, `changes` those of its sizes."""
    torch.manual_seed(seed)
    favor = {"num_features": 16, "exact_below": 0, **(options or {})}
    return kind(ConformerConfig(**{"favor": favor, **SIZES, **changes}, attn_implementation=backend)).eval()


def make_processor(*texts, **settings):
    """Features of ten bins, and the characters of texts as tokens."""
    return ConformerProcessor(
        ConformerFeatureExtractor(**{"feature_size": 10, **settings}), train_tokenizer(texts, "char")
    )


def features(length, batch=2):
    """Features `[batch, length, 10]`."""
    return torch.randn(batch, length, 10, generator=torch.Generator().manual_seed(1))


def in_pieces(stream, inputs, sizes=(1, 3, 60, 7, 100, 29)):
    """All outputs of a stream that is fed its features in pieces."""
    parts = [stream.feed_features(piece) for piece in inputs.split([*sizes], dim=1)]
    return torch.cat([*parts, stream.finish()], dim=1)


def says_each_frame(vocab_size):
    """A CTC model that says one token per frame, and of the special ones the blank alone."""
    model = build(ConformerForCTC, num_hidden_layers=1, vocab_size=vocab_size)
    with torch.no_grad():
        model.ctc_head.weight.mul_(3)
        model.ctc_head.bias[1:3] -= 99
    return model


def make_model(kind, processor, **changes):
    """A smaller model, in training mode, for features of twenty bins."""
    sizes = {"num_hidden_layers": 1, "subsampling_conv_channels": 8, "num_mel_bins": 20}
    return build(kind, seed=1, vocab_size=len(processor.tokenizer), **sizes, **changes).train()


def save_model(folder, architecture="ctc", **changes):
    """A model whose outputs vary over time, and its processor."""
    processor = make_processor(*TEXTS, feature_size=20)
    model = make_model(ConformerForCTC if architecture == "ctc" else ConformerForTransducer, processor, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


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
