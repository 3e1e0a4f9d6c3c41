"""Whole models in tokens per second: a BERT and a LLaMA-shaped decoder with random weights, with each backend.

The models end at the last hidden state: a head over a vocabulary would take more time than the attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import favor

MODELS = ("bert", "llama")
BACKENDS = ("sdpa", "favor+", "favor++", "favor#")
HIDDEN = 768
HEADS = 12
KEY_HEADS = 4


@dataclass
class Model:
    """A model whose backend can be changed.

    Attributes:
        name: "bert" or "llama".
        module: a transformers model in evaluation mode, without dropout.
        num_features, seed: options of the FAVOR backends.
        device: device of the weights.
    """

    name: str
    module: Any
    num_features: int
    seed: int
    device: str

    @classmethod
    def build(
        cls,
        name: str,
        *,
        layers: int,
        longest: int,
        num_features: int,
        seed: int,
        dtype: str,
        device: str,
    ) -> Model:
        """Makes a model with random weights.

        Args:
            name: "bert" (BERT-base shape: 12 heads of 64) or "llama" (12 heads of 64, 4 key heads, causal).
            layers: number of layers, 12 in BERT-base.
            longest: number of positions.
            num_features, seed: options of the FAVOR backends; the seed also draws the weights.
            dtype, device: type and device of the weights.
        """
        from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

        sizes: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "max_position_embeddings": longest,
        }
        module: nn.Module
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if name == "bert":
                module = BertModel(BertConfig(**sizes, intermediate_size=3072), add_pooling_layer=False)
            elif name == "llama":
                config = LlamaConfig(**sizes, num_key_value_heads=KEY_HEADS, intermediate_size=2048, use_cache=False)
                module = LlamaModel(config)
            else:
                raise ValueError(f"expected a model among {', '.join(MODELS)}, got {name!r}")
        module = module.eval().to(device=device, dtype=getattr(torch, dtype))
        return cls(name, module, num_features, seed, device)

    @property
    def causal(self) -> bool:
        """Whether its tokens see only earlier tokens."""
        return self.name == "llama"

    def use(self, backend: str) -> None:
        """Switches to a backend; FAVOR runs at every length."""
        if backend == "sdpa":
            self.module.set_attn_implementation("sdpa")
            return
        favor.configure(self.module, backend, exact_below=0, num_features=self.num_features, seed=self.seed)

    def scratch_bytes(self, batch_size: int, length: int, backward: bool) -> int:
        """Estimates the memory of a pass without attention: 12 hidden states, or 30 per layer with a backward pass.

        Args:
            batch_size: sequences.
            length: tokens of a sequence.
            backward: whether the pass has a backward pass.
        """
        states = 30 * self.module.config.num_hidden_layers if backward else 12
        return states * batch_size * length * HIDDEN * self.module.dtype.itemsize

    def tokens(self, batch_size: int, length: int) -> Tensor:
        """Draws random token numbers `[B, L]`."""
        generator = torch.Generator().manual_seed(self.seed)
        top = self.module.config.vocab_size
        return torch.randint(1000, top, (batch_size, length), generator=generator).to(self.device)

    def slope(self, batch_size: int, length: int) -> Tensor:
        """Draws a gradient of the last hidden state, `[B, L, 768]`; a constant one would vanish in the layer norm."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(batch_size, length, HIDDEN, generator=generator).to(self.device, self.module.dtype)

    def run(self, tokens: Tensor, slope: Tensor | None) -> Tensor:
        """Computes the last hidden state `[B, L, 768]`; with its gradient `slope` also gradients of all weights."""
        self.module.zero_grad(set_to_none=True)
        if slope is None:
            with torch.no_grad():
                return self.module(input_ids=tokens).last_hidden_state
        hidden = self.module(input_ids=tokens).last_hidden_state
        hidden.backward(slope)
        return hidden.detach()

    def problem(self, backend: str, tokens: Tensor, slope: Tensor | None) -> str | None:
        """Runs once and says what is wrong; None if nothing is.

        Wrong are: another backend, a result of FAVOR that equals that of SDPA, and numbers that are not finite. The
        cells of attention, not this function, check results against float64.

        Args:
            backend: the backend to run.
            tokens: `[B, L]`.
            slope: gradient of the last hidden state; None for no backward pass.
        """
        self.use(backend)
        implementation = self.module.config._attn_implementation
        if implementation != backend:
            return f"expected the backend {backend}, but the model is set to {implementation}"
        hidden = self.run(tokens, slope)
        if not hidden.isfinite().all():
            return "the last hidden state is not finite"
        if slope is not None:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            if not gradients or not all(bool(gradient.isfinite().all()) for gradient in gradients):
                return "a gradient is missing or not finite"
        if backend != "sdpa":
            few = tokens[:, : min(128, tokens.shape[1])]
            estimate = self.run(few, None)
            self.use("sdpa")
            exact = self.run(few, None)
            self.use(backend)
            if torch.equal(estimate, exact):
                return "it gives exactly what sdpa gives, so that its features did not run"
        return None
