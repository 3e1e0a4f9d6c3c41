"""A text of invented words, a tokenizer for it, and a tiny LLaMA with random weights."""

import random

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from favor.eval.language.tasks import Haystack
from favor.eval.small_decoder import make_tokenizer


@pytest.fixture(scope="session")
def novel():
    """Makes a text of about 12,000 words in sentences."""
    source = random.Random(0)
    syllables = ("ba", "le", "mi", "no", "ru", "ta", "se", "ko", "di", "pa")
    words = ["".join(source.choices(syllables, k=source.choice((2, 3)))) for _ in range(300)]
    sentences = (" ".join(source.choices(words, k=source.randint(4, 12))) + "." for _ in range(1500))
    return "\n".join(sentences)


@pytest.fixture(scope="session")
def novel_file(novel, tmp_path_factory):
    path = tmp_path_factory.mktemp("novel") / "novel.txt"
    path.write_text(novel)
    return path


@pytest.fixture(scope="session")
def tokenizer(novel):
    questions = "What is the pass key? The pass key is 0 1 2 3 4 5 6 7 8 9. The special number of Paris is"
    return make_tokenizer(f"{novel}\n{questions}", 700)


@pytest.fixture(scope="session")
def haystack(novel, tokenizer):
    return Haystack(novel, tokenizer)


@pytest.fixture
def llama(tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes)
    config.initializer_range = 0.3
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def gemma(tokenizer):
    """One layer with a sliding window, one without."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(vocab_size=len(tokenizer), head_dim=16, num_hidden_layers=2, layer_types=kinds, **sizes)
    config.sliding_window, config.initializer_range = 20, 0.3
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture
def folder(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"
