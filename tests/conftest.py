"""Parts that tests share: a tiny BERT checkpoint, a text, and tiny GLUE files; none needs a network or a GPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# On the CPU also if there is a GPU, because tests compare results bit by bit.
os.environ["ACCELERATE_USE_CPU"] = "true"
# One thread per worker: pytest-xdist and the processes that tests start share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import gzip
import importlib
import json
import random
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads this when it is imported, and other tests import it too.
    os.environ.setdefault("TRITON_INTERPRET", "1")

WORDS = ("good", "bad", "film", "plot", "the", "a", "was", "is", "not", "very", "dull", "fine", "actor", "scene")


def pytest_collection_finish():
    """Lets later collections of garbage, of which each training does some, leave out what the imports brought.

    In a run of all tests it also starts the server of forked processes, before a test does so with fewer modules.
    """
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        importlib.import_module("launching")
        forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Lets Triton's interpreter replace what a module uses of `tl` once a launch, and not in each call of a function.

    Half of the time of the tests of kernels would go there. What a launch replaces is set back when it ends.
    """
    try:
        from triton.runtime import interpreter

        replace, launch, modules = interpreter._patch_lang, interpreter._LangPatchScope(), set()
    except (ImportError, AttributeError):  # of another version
        yield
        return

    def once(function):
        nonlocal launch
        module = id(function.__globals__)
        if not launch._changes:  # those of the last launch are set back
            launch = replace(function)
            modules.clear()
        elif module not in modules:
            replace(function)
        else:
            return interpreter._LangPatchScope()
        modules.add(module)
        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Sets back to one the number of threads, which programs set for the whole process, and so for all later tests."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a checkpoint of plain BERT with random weights, with dropout, and a WordPiece tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
    BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)}).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(**sizes, vocab_size=len(vocabulary), max_position_embeddings=128, initializer_range=0.2)
    torch.manual_seed(0)
    BertForSequenceClassification(config).bert.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def decoder_folder(bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a LLaMA with random weights and two query heads for each key head, and the tokenizer of `bert_folder`."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=24, initializer_range=0.4)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a compressed text of 4000 words that the tokenizer of `bert_folder` knows."""
    path = tmp_path_factory.mktemp("text") / "words.txt.gz"
    source = random.Random(0)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.write(" ".join(source.choice(WORDS) for _ in range(4000)))
    return path


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes JSON lines: 250 texts of up to 20 words in three files to train on, 30 to evaluate on."""
    folder, source = tmp_path_factory.mktemp("shards"), random.Random(1)
    for name, number in {"train-0": 120, "train-1": 30, "train-2": 100, "validation": 30}.items():
        texts = [" ".join(source.choices(WORDS, k=source.randint(0, 20))) for _ in range(number)]
        rows = [json.dumps({"id": i, "text": text or None}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="session")
def glue_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes GLUE tasks in the official layout: SST-2 can be learned; STS-B and MNLI have odd numbers of rows."""
    root = tmp_path_factory.mktemp("glue")
    source = random.Random(0)

    def sentence() -> str:
        return " ".join(source.choice(WORDS[2:]) for _ in range(source.randint(2, 9)))

    for split, size in (("train", 40), ("dev", 13)):
        rows = [f"{sentence()} {word}\t{label}" for label, word in enumerate(("bad", "good")) for _ in range(size // 2)]
        source.shuffle(rows)
        write_tsv(root / "SST-2" / f"{split}.tsv", ["sentence\tlabel", *rows])
        columns = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
        scored = [
            f"{i}\tg\tf\t2012\t{i}\tn\tn\t{sentence()}\t{sentence()}\t{source.random() * 5:.3f}" for i in range(size)
        ]
        write_tsv(root / "STS-B" / f"{split}.tsv", [columns, *scored])
    for split, size in (("train", 9), ("dev_matched", 5), ("dev_mismatched", 5)):
        labels = ("entailment", "neutral", "contradiction")
        rows = [f"{i}\t{sentence()}\t{sentence()}\t{labels[i % 3]}" for i in range(size)]
        write_tsv(root / "MNLI" / f"{split}.tsv", ["index\tsentence1\tsentence2\tgold_label", *rows])
    return root


def write_tsv(path: Path, lines: list[str]) -> Path:
    """Writes lines to a file, and makes its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
