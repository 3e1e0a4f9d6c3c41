"""Documents of an exact number of tokens: a piece of a novel with facts between its sentences, and questions."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from favor.eval.language.tasks import HIDDEN, KEYS, Fact, Question, common, vocabulary
from favor.train.text.samples import around
from favor_command.saved import check_known

# Greatest number of tokens from the end of a sentence to the place of a fact, which moves back to that end.
NEAR = 100
SEPARATOR = "\n\n"
# Tokens by which joined texts may be longer than the texts one by one.
SPARE = 4


@dataclass(frozen=True)
class Prompt:
    """A question as tokens.

    Attributes:
        question: the question.
        ids: end of the prompt, after the document.
        target: tokens that should follow.
    """

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


class Haystack:
    """A text whose pieces become documents.

    Args:
        text: a long text; pieces start at any of its tokens.
        tokenizer: that of the model.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids = self._tokens(text)
        check_known([self.ids], tokenizer, "the text")
        self.words = vocabulary(text)
        names = tokenizer.convert_ids_to_tokens(self.ids)
        # Places after which a sentence begins.
        self.ends = [place for place, name in enumerate(names, 1) if re.search(r"[.!?]", name)]
        self.before = around(tokenizer)[0]

    def document(self, tasks: Sequence[str], length: int, case: int, depths: int, seed: int) -> Document:
        """Makes one document with the facts of some tasks; equal arguments give equal documents.

        Args:
            tasks: names of tasks; `common` cannot be combined with others.
            length: tokens of the document with the longest question, without the answer.
            case: number of the document. It chooses the depth.
            depths: number of evenly spaced places that the cases take in turns.
            seed: of all random choices.

        Raises:
            ValueError: if the facts and questions do not fit, or the text is too short.
        """
        source = Random(f"{seed} {' '.join(tasks)} {length} {case}")
        facts, questions = self._facts(
            tasks, source, length, [((case + k) % depths + 0.5) / depths for k in _spread(depths)]
        )
        prompts = [self._prompt(question) for question in questions]
        needles = [(fact.depth, self._tokens(f"\n{fact.text}\n")) for fact in sorted(facts, key=lambda f: f.depth)]
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


def _spread(depths: int) -> list[int]:
    """Gives steps from the depth of a case to the depths of its keys, which are far from each other."""
    return [key * depths // KEYS for key in range(KEYS)]
