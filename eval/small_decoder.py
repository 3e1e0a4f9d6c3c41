"""Make a small LLaMA with random weights and a tokenizer for one text, to be trained by `favor.train.clm`.

    python -m favor.eval.small_decoder --text book.txt.xz --output_dir start

No pretrained decoder comes with a package, so the figures for decoders are of one that is trained from here on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from favor.train.common.program import Parser, program
from favor.train.text.samples import read_text

END = "<|endoftext|>"


def make_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of byte pairs, without tokens around a text."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(text.splitlines(), vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, eos_token=END, pad_token=END)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder."""
    parser = Parser("favor.eval.small_decoder", __doc__, abbreviations=True)
    parser.add_argument("--text", required=True, help="UTF-8 text, plain, .gz or .xz")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder of the results")
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens of the vocabulary")
    parser.add_argument("--hidden_size", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--key_heads", type=int, default=2, help="heads of keys and values")
    parser.add_argument("--positions", type=int, default=8192, help="longest sequence")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    given = parser.parse_args(argv)
    tokenizer = make_tokenizer(read_text(given.text), given.vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=given.hidden_size,
        intermediate_size=given.hidden_size * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.key_heads,
        max_position_embeddings=given.positions,
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
