"""Language models that `write_arpa` writes: probabilities against Kneser-Ney smoothing by hand, and refusals."""

import math
import random
from collections import Counter

import pytest

from favor.models.speech import NgramModel, write_arpa

pytest.importorskip("flashlight.lib.text.decoder", reason="needs flashlight-text, of the extra lm")


@pytest.mark.parametrize("order", [2, 3, 6])
def test_a_written_model_gives_a_probability_to_every_word(tmp_path, order):
    texts = ["THE CAT SAT", "THE DOG SAT ON THE CAT", "A", "", "THE CAT SAT ON THE MAT", "SAT SAT SAT"]
    model = NgramModel(write_arpa(texts, tmp_path / "lm.arpa", order))
    assert model.words == {word for text in texts for word in text.split()}
    for history in ("", "THE", "THE CAT", "ON THE CAT", "SAT", "MAT MAT", "BIRD", "SAT ON THE CAT SAT SAT"):
        state = model.start()
        for word in history.split():
            state, _ = model.score(state, word)
        each = [math.exp(model.score(state, word)[1]) for word in [*model.words, "BIRD"]]
        assert sum(each) + math.exp(model.finish(state)) == pytest.approx(1, abs=1e-4)


def test_a_written_model_by_hand(tmp_path):
    """Two texts, too few for discounts of their own: 0.5 from all counts of 1, and 1 from counts of 2.

    Before A are 1, before B 2, before C 1 and before the end 2 different words, in all 6, over 5 kinds with `<unk>`.
    """
    model = NgramModel(write_arpa(["A B", "B C"], tmp_path / "lm.arpa", 2))
    before = {"A": 0.5, "B": 2 - 1, "C": 0.5, "</s>": 2 - 1, "D": 0}
    alone = {word: (count + (0.5 + 1 + 0.5 + 1) / 5) / 6 for word, count in before.items()}
    after_begin = {word: (count + 2 * 0.5 * alone[word]) / 2 for word, count in {"A": 0.5, "B": 0.5, "D": 0}.items()}
    for word, expected in after_begin.items():
        assert math.exp(model.score(model.start(), word)[1]) == pytest.approx(expected, abs=1e-5)
        assert math.exp(model.score(model.start(in_text=True), word)[1]) == pytest.approx(alone[word], abs=1e-5)
    state, _ = model.score(model.start(), "B")
    assert math.exp(model.finish(state)) == pytest.approx((0.5 + 2 * 0.5 * alone["</s>"]) / 2, abs=1e-5)


def test_discounts_out_of_range_are_those_of_few_counts(tmp_path):
    """Words said one, two, three times and, five of them, four times: 3 or more would give 3 - 4 / 3 * 5 = -3.7.

    As a first word one said four times has 4 of 26, less 1.5. A word is preceded by a beginning alone, and the end by
    eight words, in all 16, over 10 kinds with `<unk>`.
    """
    texts = [f"W{word}" for word, times in enumerate((1, 2, 3, 4, 4, 4, 4, 4)) for _ in range(times)]
    model = NgramModel(write_arpa(texts, tmp_path / "lm.arpa", 2))
    alone = (1 - 0.5 + (8 * 0.5 + 1.5) / 10) / 16
    expected = (4 - 1.5 + (0.5 + 1 + 6 * 1.5) * alone) / 26
    assert math.exp(model.score(model.start(), "W7")[1]) == pytest.approx(expected, abs=1e-5)


def kneser_ney(texts, words, history, word):
    """P(word | history) straight from the texts, by equations 26 and 27 of Chen and Goodman (1999), order 3."""
    grams = [
        [tuple(text[place : place + size]) for text in texts for place in range(len(text) - size + 1)]
        for size in (1, 2, 3)
    ]
    counts = [Counter(found) for found in grams]
    for size in (0, 1):
        before = Counter(gram[1:] for gram in counts[size + 1])
        counts[size] = {gram: counts[size][gram] if gram[0] == "<s>" else before[gram] for gram in counts[size]}
    del counts[0][("<s>",)]

    def probability(history):
        own = {gram[-1]: count for gram, count in counts[len(history)].items() if gram[:-1] == history}
        shorter = probability(history[1:]) if history else 1 / (len(words) + 2)
        if not own:
            return shorter
        once, twice, thrice, often = (list(counts[len(history)].values()).count(number) for number in range(1, 5))
        part = once / (once + 2 * twice)
        taken = [0, 1 - 2 * part * twice / once, 2 - 3 * part * thrice / twice, 3 - 4 * part * often / thrice]
        discounted = own.get(word, 0) - taken[min(3, own.get(word, 0))]
        return (discounted + shorter * sum(taken[min(3, count)] for count in own.values())) / sum(own.values())

    return probability(history)


def test_a_written_model_is_smoothed_as_kneser_and_ney_do(tmp_path):
    generator = random.Random(0)
    words = [f"W{number}" for number in range(40)]
    weights = [1 / (number + 1) for number in range(40)]
    texts = [generator.choices(words, weights, k=generator.randint(1, 6)) for _ in range(120)]
    model = NgramModel(write_arpa([" ".join(text) for text in texts], tmp_path / "lm.arpa", 3))
    said = [["<s>", *text, "</s>"] for text in texts]
    for text in texts[:12]:
        state, history = model.start(), ("<s>",)
        for word in [*text, "W0", "W7"]:
            expected = kneser_ney(said, model.words, history, word)
            state, log_prob = model.score(state, word)
            assert math.exp(log_prob) == pytest.approx(expected, rel=1e-4)
            history = (*history, word)[-2:]


def test_more_words_of_a_written_model(tmp_path):
    """Words that the texts lack are as probable as `<unk>`, and all probabilities still sum to 1."""
    model = NgramModel(write_arpa(["A B", "B A A"], tmp_path / "lm.arpa", 2, words=["NEW", "A"]))
    assert model.words == {"A", "B", "NEW"}
    start = model.start()
    scores = {word: model.score(start, word)[1] for word in ("A", "B", "NEW", "OTHER")}
    assert scores["NEW"] == pytest.approx(scores["OTHER"])
    assert sum(map(math.exp, [*scores.values(), model.finish(start)])) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        *((["A"], {"order": order}, f"order must be 2 to 6, which KenLM reads, got {order}") for order in (1, 7)),
        *((["A"], {"words": [wrong]}, "words must be single words") for wrong in ("TWO WORDS", "", "</s>")),
        ("A B", {}, "texts must be a list of texts, or lines of a file, got a string"),
        (["", " "], {}, "texts must hold at least one word"),
        (["A <unk>"], {}, "texts must not hold <s>, </s>, <unk>, got 'A <unk>'"),
    ],
)
def test_refusals_of_texts(tmp_path, texts, options, message):
    with pytest.raises(TypeError if isinstance(texts, str) else ValueError, match=message):
        write_arpa(texts, tmp_path / "lm.arpa", **options)
