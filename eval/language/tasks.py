"""The tasks of RULER (Hsieh et al., 2024) for models that only complete a text: facts to hide and questions about them.

A prompt ends where the answer begins ("... The pass key is"), so that a base model, which follows no instructions, only
has to continue the text. Facts are hidden in novels; the list of words of `common` fills its document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

CITIES = (
    "Athens Berlin Boston Cairo Chicago Dallas Denver Dublin Geneva Houston Lima Lisbon London Madrid Milan Moscow "
    "Oslo Paris Prague Rome Seoul Tokyo Vienna Warsaw"
)
NAMES = (
    "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho Sigma Tau Upsilon Phi Chi "
    "Psi Omega"
)
# RULER: keys of a document, values of a key, assignments after the first.
KEYS, VALUES, HOPS = 4, 4, 4
# In RULER 10 words come 30 times and others 3 times. Five frequent words also fit into 1,024 tokens.
COMMON, OFTEN, SELDOM = 5, 30, 3


@dataclass(frozen=True)
class Fact:
    """A sentence of a document, and its place: depth 0 is the beginning, 1 the end."""

    text: str
    depth: float


@dataclass(frozen=True)
class Question:
    """A question about a document, as a text to complete.

    Attributes:
        task: name of the task.
        text: end of the prompt.
        target: the text that should come next, word for word; its likelihood is measured.
        answers: texts that a generated answer should contain, all of equal weight.
        depth: place of the fact; None if there are several facts.
    """

    task: str
    text: str
    target: str
    answers: tuple[str, ...]
    depth: float | None = None


Made = tuple[list[Fact], list[Question]]


def single(source: Random, depths: Sequence[float]) -> Made:
    """Makes one pass key, at the first of the depths, and a question."""
    number = _number(source)
    fact = Fact(f"The pass key is {number}. Remember it. {number} is the pass key.", depths[0])
    text = "What is the pass key? The pass key is"
    return [fact], [Question("single", text, f" {number}", (number,), depths[0])]


def multikey(source: Random, depths: Sequence[float]) -> Made:
    """Makes four numbers of four cities, and a question for each."""
    facts, questions = [], []
    for city, depth in zip(source.sample(CITIES.split(), KEYS), depths, strict=False):
        number = _number(source)
        hidden = f"The special number of {city} is {number}. Remember it. {number} is the special number of {city}."
        facts.append(Fact(hidden, depth))
        text = f"What is the special number of {city}? The special number of {city} is"
        questions.append(Question("multikey", text, f" {number}", (number,), depth))
    return facts, questions


def multivalue(source: Random, depths: Sequence[float]) -> Made:
    """Makes four codes of one city, and a question for all of them."""
    city, numbers = source.choice(CITIES.split()), tuple(_number(source) for _ in range(VALUES))
    facts = [
        Fact(f"One of the secret codes of {city} is {n}.", d)
        for n, d in zip(numbers, _places(source, VALUES), strict=True)
    ]
    text = f"What are all {VALUES} secret codes of {city}? The {VALUES} secret codes of {city} are"
    return facts, [Question("multivalue", text, f" {', '.join(numbers)}.", numbers)]


def tracking(source: Random, depths: Sequence[float]) -> Made:
    """Makes a number that is assigned from variable to variable, and a question for all of the variables."""
    value, names = _number(source), tuple(source.sample(NAMES.split(), HOPS + 1))
    given = (value, *(f"VAR {name}" for name in names))
    places = _places(source, len(names))
    facts = [Fact(f"VAR {n} = {g}.", depth) for n, g, depth in zip(names, given, places, strict=False)]
    text = f"The {len(names)} variables that have the value {value} are VAR"
    return facts, [Question("tracking", text, f" {', VAR '.join(names)}.", names)]


def common(source: Random, words: Sequence[str], room: int, count: Callable[[str], int]) -> Made:
    """Makes a long list of words, in which five words are ten times as frequent as others, and a question for the five.

    Args:
        source: makes all random choices.
        words: the words to draw from.
        room: tokens that the list and the question may take.
        count: counts the tokens of a text.

    Raises:
        ValueError: if there is no room for the frequent words.
    """
    drawn = source.sample(list(words), min(len(words), COMMON + max(room, 0) // (2 * SELDOM)))
    often, seldom = drawn[:COMMON], drawn[COMMON:]
    ask = f'The {COMMON} words that appear most often in the list above are "'
    while seldom:
        listed = [*often] * OFTEN + [*seldom] * SELDOM
        source.shuffle(listed)
        fact = Fact(f"A list of words: {', '.join(listed)}.", 1.0)
        taken = count(fact.text) + count(ask)
        if taken <= room:
            target = '", "'.join(often) + '".'
            return [fact], [Question("common", ask, target, tuple(often))]
        seldom = seldom[: min(len(seldom) - 1, len(seldom) * room // taken)]
    raise ValueError(f"a list of words for the task common needs more than {room} tokens: take longer documents")


# Tasks whose facts are hidden in a novel, so that several tasks fit into one document.
HIDDEN: dict[str, Callable[[Random, Sequence[float]], Made]] = {
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "tracking": tracking,
}
TASKS = (*HIDDEN, "common")


def vocabulary(text: str) -> list[str]:
    """Lists the words of four to eight lower-case letters of a text, in alphabetic order."""
    return sorted(set(re.findall(r"\b[a-z]{4,8}\b", text)))


def _number(source: Random) -> str:
    return str(source.randrange(10_000, 100_000))


def _places(source: Random, number: int) -> list[float]:
    """Draws depths, in rising order."""
    return sorted(source.random() for _ in range(number))
