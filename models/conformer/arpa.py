"""From texts to an n-gram language model, in a file that KenLM reads."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from favor.models.conformer.ngram import BEGIN, END, SPECIAL, UNKNOWN

ORDERS = range(2, 7)  # those that KenLM reads

Ngrams = dict[tuple[str, ...], float]
Counts = dict[tuple[str, ...], Counter[str]]  # of the words after each history
FEW = (0, 0.5, 1, 1.5)  # discounts where the counts are too few, those of lmplz


def write_arpa(texts: Iterable[str], path: str | Path, order: int = 3, words: Iterable[str] = ()) -> Path:
    """Counts the n-grams of texts and writes a language model with Kneser-Ney smoothing, in the ARPA format.

    Interpolated, modified Kneser-Ney smoothing (Chen and Goodman 1999, section 3). With c(h w), how often word w comes
    after the history h,

        P(w | h) = (c(h w) - D(c(h w))) / c(h) + g(h) P(w | h'),

    where h' is h without its first word, and g(h) is what the discounts D took away, so that all sums to 1. Below the
    longest n-grams, c(h w) is the number of different words before h w, unless h begins a text. D is 0, D1, D2 or D3+
    for a count of 0, 1, 2 or more, found for each length from the numbers of n-grams that come once to four times. It
    is 0.5, 1 and 1.5 where these are too few. Below the single words, all words, `</s>` and `<unk>` are equally
    probable. All counts are in memory. For a large text use KenLM's program lmplz, which has the same smoothing.

    Args:
        texts: transcripts or other texts, written as the tokenizer of the speech model writes them; words stand
            between white space. `normalize_transcript` writes them as LibriSpeech does.
        path: of the file to write.
        order: words of the longest n-grams, 2 to 6. Default 3. With short texts alone it is as long as these allow.
        words: more words, which the texts need not have; one that they lack is as probable as `<unk>`. Default: none.

    Returns:
        The path.

    Raises:
        TypeError: for a single string as texts.
        ValueError: for an order out of range, texts without words, texts with `<s>`, `</s>` or `<unk>`, or something
            else than single words in `words`.

    Example:
        >>> import tempfile
        >>> from favor.models.conformer import write_arpa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_arpa(["GOOD DAY", "GOOD MORNING"], f"{folder}/lm.arpa").read_text().splitlines()[:4]
        ['\\\\data\\\\', 'ngram 1=6', 'ngram 2=5', 'ngram 3=4']
    """
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, or lines of a file, got a string; write [text] for one.")
    if order not in ORDERS:
        raise ValueError(f"order must be 2 to 6, which KenLM reads, got {order}.")
    counts: list[Counts] = [defaultdict(Counter) for _ in range(order)]
    for text in texts:
        said = [BEGIN, *text.split(), END]
        if set(SPECIAL) & set(said[1:-1]):
            raise ValueError(f"texts must not hold {', '.join(SPECIAL)}, got {text!r}.")
        for place in range(1, len(said)):
            for length in range(min(order, place + 1)):
                counts[length][tuple(said[place - length : place])][said[place]] += 1
    if len(counts[0][()]) < 2:  # the end alone
        raise ValueError("texts must hold at least one word.")
    more = set(words)
    if wrong := [word for word in sorted(more) if word in SPECIAL or word.split() != [word]]:
        raise ValueError(f"words must be single words, got {wrong[0]!r}.")
    everything = {*counts[0][()], *more, END, UNKNOWN}
    counts = list(filter(None, counts))
    counts = [*map(_words_before, counts, counts[1:]), counts[-1]]
    levels: list[Ngrams] = []
    passed_on: Ngrams = {}  # what part of the probability after a history goes to the shorter one
    for histories in counts:
        level: Ngrams = {}
        discounts = _discounts(histories)
        for history, after in histories.items():
            total = after.total()
            passed_on[history] = sum(discounts[min(count, 3)] for count in after.values()) / total
            for word in after if history else everything:
                shorter = levels[-1][(*history[1:], word)] if history else 1 / len(everything)
                own = (after[word] - discounts[min(after[word], 3)]) / total
                level[(*history, word)] = own + passed_on[history] * shorter
        levels.append(level)
    levels[0][(BEGIN,)] = 1e-99  # has a history only; never predicted
    path = Path(path)
    path.write_text("\n".join(_lines(levels, passed_on)) + "\n", encoding="utf-8")
    return path


def _words_before(counts: Counts, longer: Counts) -> Counts:
    """Counts the different words before each n-gram; one that begins a text keeps its count.

    Args:
        counts: of the n-grams.
        longer: counts of the n-grams that are one word longer.
    """
    found: Counts = defaultdict(Counter)
    for history, after in longer.items():
        found[history[1:]].update(after.keys())
    found.update({history: after for history, after in counts.items() if history[:1] == (BEGIN,)})
    return found


def _discounts(counts: Counts) -> tuple[float, ...]:
    """Finds what is taken from counts of 0, 1, 2, and 3 or more (Chen and Goodman 1999, equation 26)."""
    few = Counter(count for after in counts.values() for count in after.values())
    if not all(few[count] for count in range(1, 5)):
        return FEW
    part = few[1] / (few[1] + 2 * few[2])
    found = [0, *(count - (count + 1) * part * few[count + 1] / few[count] for count in range(1, 4))]
    return tuple(found) if all(0 < found[count] <= count for count in range(1, 4)) else FEW


def _lines(levels: list[Ngrams], passed_on: Ngrams) -> Iterator[str]:
    """Lines of the file: logarithms to the base 10 of probabilities and of what is passed on."""
    yield "\\data\\"
    yield from (f"ngram {length}={len(level)}" for length, level in enumerate(levels, 1))
    for length, level in enumerate(levels, 1):
        yield from ("", f"\\{length}-grams:")
        for ngram, probability in sorted(level.items()):
            backoff = f"\t{math.log10(passed_on[ngram]):.6f}" if ngram in passed_on and length < len(levels) else ""
            yield f"{math.log10(probability):.6f}\t{' '.join(ngram)}{backoff}"
    yield from ("", "\\end\\")
