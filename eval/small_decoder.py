"""Make a small LLaMA with random weights and a tokenizer for one text, to be trained by `favor.train.clm`.

    python -m favor.eval.small_decoder --text book.txt.xz --output_dir start

No package has a pretrained decoder, so the results for decoders are of one that starts from these random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from favor.train.common.program import Parser, check_new, program
from favor.train.text.samples import read_text


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.small_decoder", __doc__)
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder of the results")
    return parser.parse_args(argv)


END = "<|endoftext|>"
VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, LONGEST, SEED = 4096, 256, 4, 4, 2, 8192, 0


def make_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of byte pairs on a text; it adds no special tokens around a text."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(text.splitlines(), vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, eos_token=END, pad_token=END)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder."""
    given = parse_arguments(argv)
    check_new(given.output_dir)
    tokenizer = make_tokenizer(read_text(given.text), VOCABULARY)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": WIDTH * 11 // 4, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": LONGEST}
    sizes |= {"vocab_size": len(tokenizer), "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True))
    model.save_pretrained(given.output_dir)
    tokenizer.save_pretrained(given.output_dir)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens: {given.output_dir}")
    return 0


cli = program("favor.eval.small_decoder", main)


if __name__ == "__main__":
    cli()
