"""The tasks of RULER (Hsieh et al., 2024) for models that only complete a text: documents with facts, and questions.

A prompt ends where the answer begins ("... The pass key is"), so that a base model, which follows no instructions, only
has to continue the text. A document has an exact number of tokens. Facts are hidden between the sentences of a novel;
the list of words of `common` fills its document.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from favor.train.text.samples import around
from favor_command.saved import check_known

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
# Greatest number of tokens from the end of a sentence to the place of a fact, which moves back to that end.
NEAR = 100
SEPARATOR = "\n\n"
# Tokens by which joined texts may be longer than the texts one by one.
SPARE = 4


@dataclass(frozen=True)
class Question:
    """A question about a document, as a text to complete, the end of the prompt."""

    task: str
    text: str
    target: str  # what should come next, word for word; its likelihood is measured
    answers: tuple[str, ...]  # that a generated answer should contain, all of equal weight
    depth: float | None = None  # place of the fact; None if there are several facts


class Prompt(NamedTuple):
    """A question as tokens."""

    question: Question
    ids: list[int]
    target: list[int]


@dataclass(frozen=True)
class Document:
    """A text and the questions about it; with the longest question it has exactly the wanted length."""

    ids: list[int]
    prompts: list[Prompt]

    @property
    def digest(self) -> str:
        """A hash of all tokens, which identifies results of equal prompts."""
        tokens = [self.ids, *([prompt.ids, prompt.target] for prompt in self.prompts)]
        return hashlib.sha256(repr(tokens).encode()).hexdigest()[:12]


# A sentence of a document, and its place: depth 0 is the beginning, 1 the end.
Fact = tuple[float, str]
Made = tuple[list[Fact], list[Question]]


def single(source: Random, depths: Sequence[float]) -> Made:
    """Makes one pass key, at the first of the depths, and a question."""
    number = _number(source)
    fact = (depths[0], f"The pass key is {number}. Remember it. {number} is the pass key.")
    text = "What is the pass key? The pass key is"
    return [fact], [Question("single", text, f" {number}", (number,), depths[0])]


def multikey(source: Random, depths: Sequence[float]) -> Made:
    """Makes four numbers of four cities, and a question for each."""
    facts, questions = [], []
    for city, depth in zip(source.sample(CITIES.split(), KEYS), depths, strict=False):
        number = _number(source)
        hidden = f"The special number of {city} is {number}. Remember it. {number} is the special number of {city}."
        facts.append((depth, hidden))
        text = f"What is the special number of {city}? The special number of {city} is"
        questions.append(Question("multikey", text, f" {number}", (number,), depth))
    return facts, questions


def multivalue(source: Random, depths: Sequence[float]) -> Made:
    """Makes four codes of one city, and a question for all of them."""
    city, numbers = source.choice(CITIES.split()), tuple(_number(source) for _ in range(VALUES))
    places = _places(source, VALUES)
    facts = [(d, f"One of the secret codes of {city} is {n}.") for n, d in zip(numbers, places, strict=True)]
    text = f"What are all {VALUES} secret codes of {city}? The {VALUES} secret codes of {city} are"
    return facts, [Question("multivalue", text, f" {', '.join(numbers)}.", numbers)]


def tracking(source: Random, depths: Sequence[float]) -> Made:
    """Makes a number that is assigned from variable to variable, and a question for all of the variables."""
    value, names = _number(source), tuple(source.sample(NAMES.split(), HOPS + 1))
    given = (value, *(f"VAR {name}" for name in names))
    places = _places(source, len(names))
    facts = [(depth, f"VAR {n} = {g}.") for n, g, depth in zip(names, given, places, strict=False)]
    text = f"The {len(names)} variables that have the value {value} are VAR"
    return facts, [Question("tracking", text, f" {', VAR '.join(names)}.", names)]


def common(source: Random, words: Sequence[str], room: int, count: Callable[[str], int]) -> Made:
    """Makes a long list of words, five of them ten times as frequent as others, and a question for the five."""
    drawn = source.sample(list(words), min(len(words), COMMON + max(room, 0) // (2 * SELDOM)))
    often, seldom = drawn[:COMMON], drawn[COMMON:]
    ask = f'The {COMMON} words that appear most often in the list above are "'
    while seldom:
        listed = [*often] * OFTEN + [*seldom] * SELDOM
        source.shuffle(listed)
        text = f"A list of words: {', '.join(listed)}."
        taken = count(text) + count(ask)
        if taken <= room:
            target = '", "'.join(often) + '".'
            return [(1.0, text)], [Question("common", ask, target, tuple(often))]
        seldom = seldom[: min(len(seldom) - 1, len(seldom) * room // taken)]
    raise ValueError(f"a list of words for the task common needs more than {room} tokens: take longer documents")


# Tasks whose facts are hidden in a novel, so that several tasks fit into one document.
HIDDEN: dict[str, Callable[[Random, Sequence[float]], Made]] = {
    make.__name__: make for make in (single, multikey, multivalue, tracking)
}
TASKS = (*HIDDEN, "common")


def _number(source: Random) -> str:
    return str(source.randrange(10_000, 100_000))


def _places(source: Random, number: int) -> list[float]:
    """Draws depths, in rising order."""
    return sorted(source.random() for _ in range(number))


class Haystack:
    """A text whose pieces become documents."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids = self._tokens(text)
        check_known([self.ids], tokenizer, "the text")
        self.words = sorted(set(re.findall(r"\b[a-z]{4,8}\b", text)))
        names = tokenizer.convert_ids_to_tokens(self.ids)
        # Places after which a sentence begins.
        self.ends = [place for place, name in enumerate(names, 1) if re.search(r"[.!?]", name)]
        self.before = around(tokenizer)[0]

    def document(self, tasks: Sequence[str], length: int, case: int, depths: int, seed: int) -> Document:
        """Makes one document with the facts of some tasks; equal arguments give equal documents.

        With the longest question, without its answer, it has `length` tokens. The number of the document, `case`,
        chooses one of so many evenly spaced `depths`. The task `common` cannot be combined with others. Raises
        ValueError if facts and questions do not fit, or the text is too short.
        """
        source = Random(f"{seed} {' '.join(tasks)} {length} {case}")
        # The depths of the keys of a document are far from each other.
        places = [((case + key * depths // KEYS) % depths + 0.5) / depths for key in range(KEYS)]
        facts, questions = self._facts(tasks, source, length, places)
        prompts = [self._prompt(question) for question in questions]
        facts.sort(key=lambda fact: fact[0])
        needles = [(depth, self._tokens(f"\n{text}\n")) for depth, text in facts]
        longest = max(len(prompt.ids) for prompt in prompts)
        number = length - len(self.before) - longest - sum(len(ids) for _, ids in needles)
        if number < 0:
            raise ValueError(f"{length} tokens are too few for the tasks {', '.join(tasks)}: {-number} are missing")
        if number > len(self.ids):
            raise ValueError(f"the text has {len(self.ids)} tokens, and {number} are needed: give a longer text")
        start = source.randrange(len(self.ids) - number + 1)
        ids, done = [*self.before], start
        for depth, needle in needles:
            place = start + round(depth * number)
            place = max(done, self._end_before(place, start) if depth < 1 else place)
            ids += self.ids[done:place] + needle
            done = place
        return Document(ids + self.ids[done : start + number], prompts)

    def _facts(
        self, tasks: Sequence[str], source: Random, length: int, depths: Sequence[float]
    ) -> tuple[list[Fact], list[Question]]:
        if "common" in tasks:
            room = length - len(self.before) - len(self._tokens(f"\n\n{SEPARATOR}")) - SPARE
            return common(source, self.words, room, lambda text: len(self._tokens(text)))
        made = [HIDDEN[task](source, depths) for task in tasks]
        return [fact for facts, _ in made for fact in facts], [q for _, questions in made for q in questions]

    def _end_before(self, place: int, start: int) -> int:
        """Finds the last end of a sentence within `NEAR` tokens before a place; if there is none, gives the place."""
        index = bisect_right(self.ends, place) - 1
        end = self.ends[index] if index >= 0 else 0
        return end if end >= max(start, place - NEAR) else place

    def _prompt(self, question: Question) -> Prompt:
        """Cuts a question and its target after the tokens that do not change when the target is added."""
        text = SEPARATOR + question.text
        alone, both = self._tokens(text), self._tokens(text + question.target)
        same = 0
        while same < min(len(alone), len(both)) and alone[same] == both[same]:
            same += 1
        return Prompt(question, both[:same], both[same:])

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
