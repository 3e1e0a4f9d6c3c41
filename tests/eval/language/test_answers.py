"""What counts as found: fake models whose answers are known, and a real one beside `generate` and a full pass."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import favor
from favor.eval.language.needle import answer
from favor.eval.language.program import Variant
from favor.eval.language.tasks import HIDDEN


class Copies:
    """Goes on as the text did where its last tokens stood before.

    It stands for a model and, as `variant`, for an attention whose cache is a list of tokens.
    """

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
