"""Error rates against counts by hand; tests/eval/speech/test_asr.py has those of a model."""

import math

import pytest

from favor.train.speech.word_errors import ErrorCounts, character_errors, word_errors


@pytest.mark.parametrize(
    ("reference", "hypothesis", "words", "characters"),
    [
        ("the cat sat", "the cat sat", (3, 0, 0, 0), (11, 0, 0, 0)),
        ("the cat sat", "the bat sat", (2, 1, 0, 0), (10, 1, 0, 0)),
        ("the cat sat", "the sat", (2, 0, 1, 0), (7, 0, 4, 0)),
        ("the cat", "the fat cat", (2, 0, 0, 1), (7, 0, 0, 4)),
        ("a b c d", "a x c d e", (3, 1, 0, 1), (6, 1, 0, 2)),
        ("A b", "a b", (1, 1, 0, 0), (2, 1, 0, 0)),
        ("the cat", "", (0, 0, 2, 0), (0, 0, 7, 0)),
        ("", "a cat", (0, 0, 0, 2), (0, 0, 0, 5)),
        ("", "", (0, 0, 0, 0), (0, 0, 0, 0)),
        ("  the \t cat\n", "the\u00a0cat", (2, 0, 0, 0), (7, 0, 0, 0)),
        ("notable", "not able", (0, 1, 0, 1), (7, 0, 0, 1)),
        ("naïve 東京", "naive 東京", (1, 1, 0, 0), (7, 1, 0, 0)),
    ],
)
def test_counts_by_hand(reference, hypothesis, words, characters):
    assert word_errors([reference], [hypothesis]) == ErrorCounts(*words)
    assert character_errors([reference], [hypothesis]) == ErrorCounts(*characters)


def test_a_split_is_the_sum_of_its_utterances_and_not_the_mean_of_rates():
    references, hypotheses = ["a b c d", "a", ""], ["a b c d", "b", "c"]
    total = word_errors(references, hypotheses)
    assert total == ErrorCounts(hits=4, substitutions=1, deletions=0, insertions=1)
    assert (total.errors, total.reference_length, total.rate) == (2, 5, 0.4)
    parts = [word_errors([r], [h]) for r, h in zip(references, hypotheses, strict=True)]
    assert parts[0] + parts[1] + parts[2] == total


def test_rates_at_the_edges():
    assert word_errors([], []).rate == 0
    assert word_errors([""], [""]).rate == 0
    assert word_errors([""], ["a"]).rate == math.inf
    assert word_errors(["a"], ["b c d"]).rate == 3
    assert word_errors(["a b"], [""]).rate == 1
