"""Documents with facts: their length, where the facts stand, and whether questions have the answers of the text."""

import re
from collections import Counter

import pytest

from favor.eval.language.tasks import COMMON, HIDDEN, NEAR, OFTEN, SELDOM, TASKS

GROUPS = [*([task] for task in TASKS), [*HIDDEN]]


@pytest.mark.parametrize("tasks", GROUPS, ids=" ".join)
def test_documents_have_their_length_and_depend_on_their_arguments_alone(haystack, tokenizer, tasks):
    document = haystack.document(tasks, 1601, 3, 10, seed=1)
    assert len(document.ids) + max(len(prompt.ids) for prompt in document.prompts) == 1601
    assert {prompt.question.task for prompt in document.prompts} == {*tasks}
    for prompt in document.prompts:
        question, begin, end = prompt.question, tokenizer.decode(prompt.ids), tokenizer.decode(prompt.target)
        assert begin + end == f"\n\n{question.text}{question.target}"
        assert all(part in end and part not in begin for part in question.answers)
    assert haystack.document(tasks, 1601, 3, 10, seed=1) == document
    others = [haystack.document(tasks, 1601, 4, 10, seed=1), haystack.document(tasks, 1601, 3, 10, seed=2)]
    assert document.digest not in [other.digest for other in others]


@pytest.mark.parametrize("case", range(5))
def test_single_needle_stands_at_its_depth_between_two_sentences_of_the_text(haystack, tokenizer, case):
    document = haystack.document(["single"], 1200, case, 5, seed=0)
    (prompt,) = document.prompts
    number = prompt.question.answers[0]
    needle = tokenizer(f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n")["input_ids"]
    (place,) = [i for i in range(len(document.ids)) if document.ids[i : i + len(needle)] == needle]
    rest = document.ids[:place] + document.ids[place + len(needle) :]
    assert prompt.question.depth == (case + 0.5) / 5
    assert 0 <= prompt.question.depth * len(rest) - place <= NEAR
    assert "." in tokenizer.decode(document.ids[place - 1])
    whole = " ".join(map(str, haystack.ids))
    assert " ".join(map(str, rest)) in whole


def test_every_key_is_asked_for_and_has_one_number(haystack, tokenizer):
    document = haystack.document(["multikey"], 1600, 1, 8, seed=0)
    text = tokenizer.decode(document.ids)
    found = dict(re.findall(r"\nThe special number of (\w+) is (\d{5})\. Remember it\.", text))
    asked = {re.search(r"of (\w+)\?", p.question.text)[1]: p.question.answers[0] for p in document.prompts}
    assert found == asked
    assert len(asked) == 4
    places = [len(re.split(p.question.answers[0], text)[0]) / len(text) for p in document.prompts]
    assert places == pytest.approx([p.question.depth for p in document.prompts], abs=0.08)
    assert len({p.question.depth for p in document.prompts}) == 4


def test_all_values_of_a_key_are_answers_in_the_order_of_the_text(haystack, tokenizer):
    document = haystack.document(["multivalue"], 1600, 1, 8, seed=0)
    found = re.findall(r"codes of \w+ is (\d{5})\.", tokenizer.decode(document.ids))
    assert tuple(found) == document.prompts[0].question.answers
    assert len(set(found)) == 4


def test_variables_pass_on_the_number_that_is_asked_for(haystack, tokenizer):
    document = haystack.document(["tracking"], 1600, 1, 8, seed=0)
    values = {}
    for name, given in re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\.\n", tokenizer.decode(document.ids)):
        values[name] = values.get(given, given)
    question = document.prompts[0].question
    wanted = re.search(r"value (\d{5})", question.text)[1]
    assert tuple(name for name, value in values.items() if value == wanted) == question.answers
    assert len(question.answers) == 5


def test_common_words_are_common(haystack, tokenizer):
    document = haystack.document(["common"], 2000, 1, 8, seed=0)
    listed = tokenizer.decode(document.ids).rpartition("A list of words: ")[2]
    counts = Counter(re.findall(r"[a-z]+", listed)).most_common()
    assert {word for word, _ in counts[:COMMON]} == set(document.prompts[0].question.answers)
    assert [number for _, number in counts[:COMMON]] == [OFTEN] * COMMON
    assert {number for _, number in counts[COMMON:]} == {SELDOM}


@pytest.mark.parametrize(
    ("tasks", "length", "message"),
    [
        (["single"], 40, "too few for the tasks"),
        ([*HIDDEN], 40, "too few for the tasks"),
        (["common"], 40, "take longer documents"),
        (["single"], 10**6, "give a longer text"),
    ],
)
def test_lengths_that_are_refused(haystack, tasks, length, message):
    with pytest.raises(ValueError, match=message):
        haystack.document(tasks, length, 0, 4, seed=0)
