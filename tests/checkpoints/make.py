"""Writes the checkpoints of tests/checkpoints; run with version 0.1.0 installed.

Landmarks have another form since: with --landmarks, run with this version, it writes the outputs of theirs anew.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import favor
from favor.models.bert import PerformerBertConfig, PerformerBertForSequenceClassification
from favor.models.conformer import ConformerConfig, ConformerForCTC

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 50}
BERT_SIZES = {**SIZES, "max_position_embeddings": 64, "initializer_range": 0.3}
CALIBRATED = {
    "bert_calibrated": ("favor#", {"num_features": 12}),
    "bert_calibrated_window": ("favor#", {"num_features": 12, "features": "sderf", "window": 8}),
    "bert_weights": ("favor+", {"num_features": 8, "feature_weights": True}),
}
CONFIGURED = {
    "bert_landmark": ("favor#", {"num_features": 6, "features": "landmark"}),
    "bert_landmark_window": ("favor#", {"num_features": 6, "features": "landmark", "window": 8}),
    "bert_batch": ("favor++", {"num_features": 12}),
    "bert_batch_window": ("favor#", {"num_features": 12, "window": 8, "factorization": "cholesky"}),
}


def tokens(rows, length, seed):
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


DATA = [{"input_ids": tokens(3, 40, 1)}]
PADDED = {"input_ids": tokens(3, 40, 0), "attention_mask": torch.ones(3, 40, dtype=torch.long)}
PADDED["attention_mask"][1, 29:] = PADDED["attention_mask"][2, :6] = 0


def seeded(kind, config, seed=0):
    torch.manual_seed(seed)
    return kind(config).eval()


def bert():
    return seeded(BertModel, BertConfig(**BERT_SIZES))


@torch.no_grad()
def save(root, name, model, inputs, **outputs):
    model.save_pretrained(root / name)
    for part, tensors in (("inputs", inputs), ("outputs", {"0": model(**inputs)[0], **outputs})):
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        save_file(tensors, root / name / f"{part}.safetensors")


def main(root):
    for name, (backend, options) in CALIBRATED.items():
        found = favor.calibrate(bert(), DATA, attn_implementation=backend, exact_below=0, **options)
        save(root, name, found, PADDED)
    for name, (backend, options) in CONFIGURED.items():
        save(root, name, favor.configure(bert(), backend, exact_below=0, **options), PADDED)
    options = {"layers": "auto", "flop_budget": 0.8, "num_features": 4, "window": 4, "statistics": "calibrated"}
    found = favor.convert(bert(), "favor#", dataloader=DATA, exact_below=0, **options)
    save(root, "bert_converted", found, PADDED)
    llama = seeded(LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.3))
    llama = favor.calibrate(llama, DATA, exact_below=0, num_features=12, window=8)
    save(root, "llama_calibrated", llama, {"input_ids": tokens(2, 30, 2)})
    options = {"num_features": 12, "features": "saderf", "exact_below": 0, "seed": 5}
    config = PerformerBertConfig(**BERT_SIZES, num_labels=3, favor=options)
    save(root, "performer_bert", seeded(PerformerBertForSequenceClassification, config), PADDED)
    sizes = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 12}
    sizes |= {"conv_kernel_size": 6, "subsampling_conv_channels": 8, "num_mel_bins": 20, "causal": True}
    options = {"num_features": 8, "exact_below": 0}
    model = seeded(ConformerForCTC, ConformerConfig(**sizes, attn_implementation="favor+", favor=options), seed=1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    features = torch.randn(2, 80, 20, generator=torch.Generator().manual_seed(3))
    stream = model.stream(batch_size=2)
    pieces = torch.cat([stream.feed_features(piece) for piece in features.split([33, 47], dim=1)], dim=1)
    save(root, "conformer_stream", model, {"input_features": features}, pieces=pieces)


@torch.no_grad()
def write_landmarks_anew(root):
    for name in ("bert_landmark", "bert_landmark_window"):
        model = BertModel.from_pretrained(root / name, attn_implementation="favor#").eval()
        save_file({"0": model(**PADDED).last_hidden_state}, root / name / "outputs.safetensors")


if "--landmarks" in sys.argv:
    write_landmarks_anew(Path(sys.argv[1]))
else:
    main(Path(sys.argv[1]))
