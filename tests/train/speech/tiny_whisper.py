"""An untrained Whisper that hears six seconds, and a causal model; both know words of the small corpus."""

from pathlib import Path

import torch
import transformers
from speech import WORDS
from transformers import WhisperProcessor

from favor.eval.small_decoder import make_tokenizer

SPECIAL = [f"<|{word}|>" for word in ("endoftext", "startoftranscript", "startofprev", "nospeech", "notimestamps")]
TOKENS = [*(f"Ġ{word.lower()}" for word in WORDS), *"abcdef", "Ġ", *SPECIAL]
FRAMES = 600


def make_processor() -> WhisperProcessor:
    """Whisper's special tokens, and the words of the corpus in small letters."""
    words = [f"Ġ{word.lower()}" for word in WORDS]
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    vocabulary = dict.fromkeys([*TOKENS[:-5], *("".join(pair) for pair in merges)])
    entries = {token: number for number, token in enumerate([*vocabulary, *SPECIAL])}
    ends = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL[0])
    tokenizer = transformers.WhisperTokenizer(vocab=entries, merges=merges, **ends)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.set_prefix_tokens(predict_timestamps=False)
    return WhisperProcessor(transformers.WhisperFeatureExtractor(chunk_length=FRAMES // 100), tokenizer)


def save(path: Path, processor: WhisperProcessor) -> Path:
    """Saves the model and its processor in a folder."""
    torch.manual_seed(0)
    end, start, no_times = processor.tokenizer.convert_tokens_to_ids([SPECIAL[0], SPECIAL[1], SPECIAL[4]])
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": len(processor.tokenizer)}
    sizes |= {"max_source_positions": FRAMES // 2, "max_target_positions": 24}
    config = transformers.WhisperConfig(**sizes, **special, suppress_tokens=None, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config)
    options = {"max_length": 24, "is_multilingual": False, "return_timestamps": False}
    model.generation_config = transformers.GenerationConfig(**options, no_timestamps_token_id=no_times, **special)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def save_causal(folder):
    """Writes a LLaMA with random weights and its tokenizer."""
    tokenizer = make_tokenizer("bad cab face ace\nBAD CAB", 60)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
