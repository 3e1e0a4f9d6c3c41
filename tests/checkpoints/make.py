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


def tokens(rows, length, seed):
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded():
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, 29:] = 0
    mask[2, :6] = 0
    return {"input_ids": tokens(3, 40, 0), "attention_mask": mask}


def bert():
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES, max_position_embeddings=64, initializer_range=0.3)).eval()


def save(root, name, model, inputs, outputs):
    model.save_pretrained(root / name)
    save_file({key: value.contiguous() for key, value in inputs.items()}, root / name / "inputs.safetensors")
    save_file({key: value.contiguous() for key, value in outputs.items()}, root / name / "outputs.safetensors")


@torch.no_grad()
def main(root):
    data = [{"input_ids": tokens(3, 40, 1)}]
    for name, backend, options in (
        ("bert_calibrated", "favor#", {"num_features": 12}),
        ("bert_calibrated_window", "favor#", {"num_features": 12, "features": "sderf", "window": 8}),
        ("bert_weights", "favor+", {"num_features": 8, "feature_weights": True}),
    ):
        with torch.enable_grad():
            model = favor.calibrate(bert(), data, attn_implementation=backend, exact_below=0, **options)
        save(root, name, model, padded(), {"0": model(**padded()).last_hidden_state})
    for name, backend, options in (
        ("bert_landmark", "favor#", {"num_features": 6, "features": "landmark"}),
        ("bert_landmark_window", "favor#", {"num_features": 6, "features": "landmark", "window": 8}),
        ("bert_batch", "favor++", {"num_features": 12}),
        ("bert_batch_window", "favor#", {"num_features": 12, "window": 8, "factorization": "cholesky"}),
    ):
        model = favor.configure(bert(), backend, exact_below=0, **options)
        save(root, name, model, padded(), {"0": model(**padded()).last_hidden_state})
    model = bert()
    with torch.enable_grad():
        model = favor.convert(
            model,
            "favor#",
            dataloader=data,
            layers="auto",
            flop_budget=0.8,
            num_features=4,
            window=4,
            statistics="calibrated",
            exact_below=0,
        )
    save(root, "bert_converted", model, padded(), {"0": model(**padded()).last_hidden_state})
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.3)).eval()
    llama = favor.calibrate(llama, [{"input_ids": tokens(3, 40, 1)}], exact_below=0, num_features=12, window=8)
    save(root, "llama_calibrated", llama, {"input_ids": tokens(2, 30, 2)}, {"0": llama(tokens(2, 30, 2)).logits})
    torch.manual_seed(0)
    options = {"num_features": 12, "features": "saderf", "exact_below": 0, "seed": 5}
    config = PerformerBertConfig(
        **SIZES, max_position_embeddings=64, num_labels=3, initializer_range=0.3, favor=options
    )
    model = PerformerBertForSequenceClassification(config).eval()
    save(root, "performer_bert", model, padded(), {"0": model(**padded()).logits})
    torch.manual_seed(1)
    config = ConformerConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_kernel_size=6,
        subsampling_conv_channels=8,
        num_mel_bins=20,
        vocab_size=12,
        causal=True,
        attn_implementation="favor+",
        favor={"num_features": 8, "exact_below": 0},
    )
    model = ConformerForCTC(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(3)
    features = torch.randn(2, 80, 20, generator=torch.Generator().manual_seed(3))
    stream = model.stream(batch_size=2)
    pieces = torch.cat([stream.feed_features(piece) for piece in features.split([33, 47], dim=1)], dim=1)
    outputs = {"0": model(features).logits, "pieces": pieces}
    save(root, "conformer_stream", model, {"input_features": features}, outputs)


@torch.no_grad()
def write_landmarks_anew(root):
    for name in ("bert_landmark", "bert_landmark_window"):
        model = BertModel.from_pretrained(root / name, attn_implementation="favor#").eval()
        save_file({"0": model(**padded()).last_hidden_state}, root / name / "outputs.safetensors")


if "--landmarks" in sys.argv:
    write_landmarks_anew(Path(sys.argv[1]))
else:
    main(Path(sys.argv[1]))
