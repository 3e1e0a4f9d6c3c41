"""Whole models that the benchmark times: encoders of text, images and speech, and decoders, with random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertModel,
    ViTConfig,
    ViTModel,
)

import favor
from favor.models.conformer import ConformerConfig, ConformerModel

# Text, images and llama: the width of BERT-base. The Conformer has the width of the FAVOR# paper.
MODELS = ("bert", "modernbert", "vit", "conformer", "llama", "gemma")
BACKENDS = ("sdpa", "favor+", "favor++", "favor#", "landmark")
HIDDEN, MODEL_HEADS, MODEL_KEY_HEADS = 768, 12, 4
GEMMA_HEADS, GEMMA_KEY_HEADS, GEMMA_PERIOD, GEMMA_WINDOW, GEMMA_WORDS = 4, 1, 6, 512, 32000
PATCH = 16


def _module(name: str, layers: int, longest: int) -> Any:
    """Makes the module of a model of `MODELS`."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": MODEL_HEADS}
    positions: dict[str, Any] = {"max_position_embeddings": longest}
    if name == "bert":
        return BertModel(BertConfig(**sizes, **positions, intermediate_size=3072), add_pooling_layer=False)
    if name == "modernbert":
        return ModernBertModel(ModernBertConfig(**sizes, **positions, intermediate_size=1152))
    if name == "vit":
        side = PATCH * math.ceil(math.sqrt(longest))
        return ViTModel(ViTConfig(**sizes, intermediate_size=3072, image_size=side), add_pooling_layer=False)
    if name == "conformer":
        config = ConformerConfig.preset("paper", num_hidden_layers=layers, **positions, attn_implementation="sdpa")
        return ConformerModel(config)
    sizes |= {**positions, "intermediate_size": 2048, "use_cache": False}
    if name == "llama":
        return LlamaModel(LlamaConfig(**sizes, num_key_value_heads=MODEL_KEY_HEADS))
    # As in Gemma 3, the last of six layers is global; here the last layer of all is always global.
    kinds = ["sliding_attention" if (layers - n) % GEMMA_PERIOD else "full_attention" for n in range(1, layers + 1)]
    sizes |= {"num_attention_heads": GEMMA_HEADS, "num_key_value_heads": GEMMA_KEY_HEADS, "head_dim": 256}
    sizes |= {"layer_types": kinds, "sliding_window": GEMMA_WINDOW, "vocab_size": GEMMA_WORDS}
    return Gemma3TextModel(Gemma3TextConfig(**sizes))


@dataclass(frozen=True)
class Model:
    """A whole model up to its last hidden state: a head over a vocabulary would take more time than the attention."""

    name: str
    module: Any
    num_features: int
    seed: int

    @classmethod
    def build(cls, name: str, *, layers: int, longest: int, num_features: int, seed: int, dtype: torch.dtype) -> Model:
        """Makes a model of `MODELS` with random weights and `longest` positions; the seed also draws the weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _module(name, layers, longest)
        return cls(name, module.eval().to(dtype), num_features, seed)

    def use(self, backend: str) -> None:
        """Switches to a backend; FAVOR runs at every length."""
        if backend == "sdpa":
            self.module.set_attn_implementation("sdpa")
        else:
            favor.configure(self.module, backend, exact_below=0, num_features=self.num_features, seed=self.seed)

    def inputs(self, batch_size: int, length: int) -> tuple[dict[str, Any], Tensor]:
        """Draws arguments for so many tokens, and a gradient of the last hidden state; a constant one would vanish.

        The tokens are patches of an image for a ViT, which adds one, and frames of the encoder for a Conformer.
        """
        generator, config = torch.Generator().manual_seed(self.seed), self.module.config
        device, dtype = self.module.device, self.module.dtype
        given: dict[str, Any]
        shape: tuple[int, ...]
        if self.name == "vit":
            rows = max(n for n in range(1, math.isqrt(length) + 1) if length % n == 0)
            shape = (batch_size, 3, PATCH * rows, PATCH * length // rows)
            given = {"pixel_values": torch.randn(shape, generator=generator).to(device, dtype)}
            given["interpolate_pos_encoding"] = True
        elif self.name == "conformer":  # whose subsampling makes one frame of four
            shape = (batch_size, 4 * length + 9, config.num_mel_bins)
            given = {"input_features": torch.randn(shape, generator=generator).to(device, dtype)}
        else:
            tokens = torch.randint(1000, config.vocab_size, (batch_size, length), generator=generator)
            given = {"input_ids": tokens.to(device)}
        slope = torch.randn(batch_size, length + (self.name == "vit"), config.hidden_size, generator=generator)
        return given, slope.to(device, dtype)

    def run(self, given: dict[str, Any], slope: Tensor | None) -> Tensor:
        """Computes the last hidden state `[B, L, width]`; with its gradient `slope` also gradients of all weights."""
        self.module.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(slope is not None):
            hidden = self.module(**given).last_hidden_state
        if slope is not None:
            hidden.backward(slope)
        return hidden.detach()

    def problem(self, backend: str, given: dict[str, Any], slope: Tensor | None) -> str | None:
        """Runs once and says what is wrong; None if nothing is.

        Wrong are: another backend, a result of FAVOR that equals that of SDPA, and numbers that are not finite. The
        cells of attention, not this function, check results against float64.
        """
        self.use(backend)
        implementation = self.module.config._attn_implementation
        if implementation != backend:
            return f"expected the backend {backend}, but the model is set to {implementation}"
        found = [self.run(given, slope), *(p.grad for p in self.module.parameters() if p.grad is not None)]
        if not all(bool(tensor.isfinite().all()) for tensor in found):
            return "the last hidden state or a gradient is not finite"
        if slope is not None and len(found) == 1:
            return "it gives no gradients"
        if backend != "sdpa":
            few = self.inputs(1, min(128, found[0].shape[1]))[0]
            estimate = self.run(few, None)
            self.use("sdpa")
            if torch.equal(estimate, self.run(few, None)):
                return "it gives exactly what sdpa gives, so that its features did not run"
        return None
