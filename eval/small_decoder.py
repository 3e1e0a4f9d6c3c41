"""Make a small LLaMA with random weights and a tokenizer for one text, to be trained by `favor.train.clm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from favor.eval.options.small_decoder import parse_arguments
from favor.train.common.program import check_new, program
from favor.train.text.samples import read_text

END = "<|endoftext|>"


def make_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of byte pairs on a text; it adds no special tokens around a text."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(text.splitlines(), vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, eos_token=END, pad_token=END)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder."""
    given = parse_arguments(argv)
    check_new(given.output_dir)
    tokenizer = make_tokenizer(read_text(given.text), given.vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=given.hidden_size,
        intermediate_size=given.hidden_size * 11 // 4,
        num_hidden_layers=given.num_hidden_layers,
        num_attention_heads=given.num_attention_heads,
        num_key_value_heads=given.num_key_value_heads,
        max_position_embeddings=given.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(given.seed)
    model = LlamaForCausalLM(config)
    model.save_pretrained(given.output_dir)
    tokenizer.save_pretrained(given.output_dir)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens: {given.output_dir}")
    return 0


cli = program("favor.eval.small_decoder", main)


if __name__ == "__main__":
    cli()
