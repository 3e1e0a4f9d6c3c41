"""A small corpus, a small CTC model, and runs of programs that write a report."""

import json
import random

import pytest
import torch
from tiny_speech import save_model, write_corpus
from transformers import LlamaConfig, LlamaForCausalLM

from favor.eval.small_decoder import make_tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def ctc(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("ctc"))


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


@pytest.fixture
def llama(tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, **sizes)
    config.initializer_range = 0.3
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def llama_folder(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def sized(monkeypatch):
    """Gives a function that sets constants of a module, until the test ends."""

    def call(module, **values):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    return call


@pytest.fixture
def ran(tmp_path):
    """Gives a function that runs a program, checks what all share, and returns its JSON and its Markdown."""

    def call(program, *words, name="x", code=None, folder=tmp_path / "out"):
        found = program.main([*map(str, words), "--output_dir", str(folder), "--name", name])
        content, text = json.loads((folder / f"{name}.json").read_text()), (folder / f"{name}.md").read_text()
        assert found == (int(not all(check["holds"] for check in content["checks"])) if code is None else code)
        assert (content if "command" in content else content["facts"])["command"] in text
        assert str(tmp_path) not in text + json.dumps(content)
        assert all(path.stat().st_size > 1000 for path in folder.glob("*.png"))
        return content, text

    return call
