"""Needles: fake models whose answers are known, a real one beside `generate` and a full pass, and the program."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import favor
from favor.eval.language import needle
from favor.eval.language.needle import answer
from favor.eval.language.program import Variant
from favor.eval.language.tasks import HIDDEN

BACKENDS = ("exact", "landmark:selected_keys=32")


class Copies:
    """Stands for a model that goes on as the text did where its last tokens stood before, and for its attention."""

    device = "cpu"

    def __init__(self, size, last=3):
        self.size, self.last = size, last

    def apply(self, model):
        pass

    def new_cache(self, model):
        return Rows([[]])

    def __call__(self, input_ids, past_key_values, use_cache, logits_to_keep):
        past_key_values.rows = [[*row, *new] for row, new in zip(past_key_values.rows, input_ids.tolist(), strict=True)]
        return SimpleNamespace(logits=torch.stack([self.next(row) for row in past_key_values.rows])[:, None])

    def next(self, tokens):
        """Logits of the next token."""
        logits = torch.zeros(self.size)
        for start in range(len(tokens) - self.last):
            if tokens[start : start + self.last] == tokens[-self.last :]:
                logits[tokens[start + self.last]] = 100.0
                break
        return logits


class Rows:
    """Tokens of a batch, as a cache of keys would keep them."""

    def __init__(self, rows):
        self.rows = rows

    def batch_repeat_interleave(self, repeats):
        self.rows = [row for row in self.rows for _ in range(repeats)]


def test_a_model_that_copies_finds_every_needle(tokenizer, haystack):
    for task, last in (("single", 3), ("multikey", 6)):
        model, document = Copies(len(tokenizer), last=last), haystack.document([task], 1600, 0, 5, seed=0)
        for found in answer(model, tokenizer, model, document)["answers"]:
            assert found["score"] == 1
            assert found["nats"] < 1e-6


def test_a_part_of_several_answers_counts_as_much(tokenizer, haystack):
    document = haystack.document(["multivalue"], 1600, 0, 5, seed=0)
    (prompt,) = document.prompts
    wanted = tokenizer(f" {', '.join(prompt.question.answers[:3])}, 00000.")["input_ids"]

    class Says(Copies):
        def next(self, tokens):
            said = len(tokens) - len(document.ids) - len(prompt.ids)
            return torch.eye(self.size)[wanted[max(said, 0)]]

    model = Says(len(tokenizer))
    (found,) = answer(model, tokenizer, model, document)["answers"]
    assert found["score"] == 0.75


@pytest.mark.parametrize("text", ["sdpa", "exact", "landmark:selected_keys=64"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_answers_are_those_of_generate_and_nats_those_of_a_full_pass(name, text, tokenizer, haystack, request):
    model, variant = request.getfixturevalue(name), Variant.parse(text)
    document = haystack.document([*HIDDEN], 900, 0, 5, seed=0)
    found = answer(model, tokenizer, variant, document)["answers"]
    assert [one["task"] for one in found] == [prompt.question.task for prompt in document.prompts]
    with torch.no_grad():
        for one, prompt in zip(found, document.prompts, strict=True):
            number = len(prompt.target)
            ids = torch.tensor([document.ids + prompt.ids])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
            options |= {"past_key_values": variant.new_cache(model), "pad_token_id": 0}
            said = model.generate(ids, max_new_tokens=number, min_new_tokens=number, **options)[0, ids.shape[1] :]
            assert one["text"] == tokenizer.decode(said)
            whole = torch.tensor([document.ids + prompt.ids + prompt.target])
            logits = model(whole).logits[0, -number - 1 : -1]
            assert one["nats"] == pytest.approx(float(cross_entropy(logits, whole[0, -number:])), rel=1e-3)
    assert isinstance(variant.new_cache(model), favor.FavorCache) == text.startswith("landmark")


@pytest.fixture
def run(folder, novel_file, monkeypatch, ran):
    """Gives a function that runs the program; it returns what is the same each time, and the report."""
    monkeypatch.setattr(needle, "DEPTHS", 2)

    def call(*words):
        where = [folder, "--text", novel_file, "--backends", *BACKENDS]
        found, text = ran(needle, *where, "--cases", 4, *words, code=0)
        return {key: found[key] for key in ("cells", "variants", "model")}, text

    return call


def test_the_table(run):
    found, text = run("--lengths", "600", "500", "--tasks", "single", "multikey")
    cells = found["cells"]
    assert [(c["task"], c["variant"], c["length"]) for c in cells] == [
        (task, variant, length) for task in ("single", "multikey") for variant in BACKENDS for length in (500, 600)
    ]
    assert [c["answers"] for c in cells] == [4] * 4 + [16] * 4
    assert all(0 <= c["accuracy"] <= 1 < c["nats"] and sorted(c["by_depth"]) == ["0.25", "0.75"] for c in cells)
    assert "landmark:selected_keys=32 finds at least 95 % of what exact finds" in text


def test_a_run_that_was_stopped_goes_on_and_gives_the_same(run, tmp_path, monkeypatch):
    words = ["--lengths", "150", "300", "--tasks", "single"]
    first, records = run(*words)[0], tmp_path / "out" / "x.jsonl"
    lines = records.read_text().splitlines()
    assert len(lines) == 17  # the first is empty
    records.write_text("\n".join([*lines[:10], lines[10][:30]]))
    answered, real = [], needle.answer
    monkeypatch.setattr(needle, "answer", lambda *given: answered.append(1) or real(*given))
    for _ in range(2):
        assert run(*words)[0] == first
        assert len(answered) == 7


def test_all_tasks_are_asked_of_one_document(run):
    tasks = ["single", "multikey", "multivalue", "tracking"]
    cells = run("--lengths", "900", "--tasks", *tasks, "--together", "--cases", "2")[0]["cells"]
    assert [(c["task"], c["answers"]) for c in cells[::2]] == list(zip(tasks, (2, 8, 2, 2), strict=True))


def test_means_of_each_depth():
    answers = [
        {"depth": depth, "score": score, "nats": 1.0 + score} for depth, score in ((0.25, 1), (0.25, 0), (0.75, 1))
    ]
    cell = needle.cell(("single", "exact", 10), answers)
    assert cell["by_depth"] == {"0.25": 0.5, "0.75": 1.0}
    assert (cell["accuracy"], cell["nats"]) == (pytest.approx(2 / 3), pytest.approx(5 / 3))
    assert needle.cell(("tracking", "exact", 10), [{"depth": None, "score": 1, "nats": 1.0}])["by_depth"] == {}
