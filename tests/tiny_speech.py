"""A small corpus of sines and small untrained speech models."""

import json

import numpy as np
import soundfile
import torch

from favor.models.conformer import (
    ConformerConfig,
    ConformerFeatureExtractor,
    ConformerForCTC,
    ConformerForTransducer,
    ConformerProcessor,
    train_tokenizer,
)

RATE = 16000
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


def make_model(kind, processor, **changes):
    """A model with exact attention."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"conv_kernel_size": 5, "subsampling_conv_channels": 8, "num_mel_bins": 20, "prediction_hidden_size": 8}
    sizes |= {"joint_hidden_size": 8, "vocab_size": len(processor.tokenizer), "attn_implementation": "sdpa"}
    torch.manual_seed(1)
    return kind(ConformerConfig(**sizes, **changes))


def save_model(folder, architecture="ctc", **changes):
    """A model whose outputs vary over time, and its processor."""
    processor = ConformerProcessor(ConformerFeatureExtractor(feature_size=20), train_tokenizer(TEXTS, "char", None))
    model = make_model(ConformerForCTC if architecture == "ctc" else ConformerForTransducer, processor, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
