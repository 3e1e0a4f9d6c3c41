"""A tiny causal language model for tests that rescore texts."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from favor.eval.small_decoder import make_tokenizer


def save_causal(folder):
    """Writes a LLaMA with random weights and its tokenizer."""
    tokenizer = make_tokenizer("bad cab face ace\nBAD CAB", 60)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
