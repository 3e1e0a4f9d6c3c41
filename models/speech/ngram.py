"""N-gram language models of words, in the files of KenLM: read, and written from texts."""

from __future__ import annotations

import gzip
import math
import mmap
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from favor._parts import needs

BEGIN, END, UNKNOWN = SPECIAL = ("<s>", "</s>", "<unk>")
LN10 = math.log(10)
ORDERS = range(2, 7)  # those that KenLM reads

Ngrams = dict[tuple[str, ...], float]
Counts = dict[tuple[str, ...], Counter[str]]  # of the words after each history
FEW = (0, 0.5, 1, 1.5)  # discounts where the counts are too few, those of lmplz


class NgramModel:
    """An n-gram language model of words, read and evaluated by KenLM (Heafield 2011). Needs the extra `lm`.

    Probabilities are natural logarithms. A word that the model does not know has the probability of `<unk>`. If the
    file has no `<unk>`, KenLM gives such words a probability of 10^-100, so that a search hardly ever finds them.

    Args:
        path: an ARPA file, also one compressed by gzip, or a binary file of KenLM. KenLM shows on standard error how
            far it has read an ARPA file; a binary file loads faster.

    Attributes:
        words: that the model knows, without `<s>`, `</s>` and `<unk>`.
        kenlm: the model as flashlight-text has it, whose words are numbers and whose logarithms have the base 10.

    Raises:
        ImportError: if the package flashlight-text is not installed.
        ValueError: for a file that is missing or is no language model.

    Example:
        >>> import tempfile
        >>> from favor.models.speech import NgramModel, write_arpa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = NgramModel(write_arpa(["GOOD DAY", "GOOD MORNING"], f"{folder}/lm.arpa"))
        >>> sorted(model.words)
        ['DAY', 'GOOD', 'MORNING']
        >>> model.score(model.start(), "GOOD")[1] > model.score(model.start(), "DAY")[1]
        True
    """

    def __init__(self, path: str | Path) -> None:
        needs("lm", "flashlight")
        from flashlight.lib.text.decoder.kenlm import KenLM
        from flashlight.lib.text.dictionary import Dictionary

        if not Path(path).is_file():
            raise ValueError(f"language_model must be an ARPA file or a binary file of KenLM; {path} is no file.")
        found = list(dict.fromkeys([UNKNOWN, *_words_of(Path(path))]))
        try:
            self.kenlm = KenLM(str(path), Dictionary(found))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1]
            raise ValueError(f"{path} cannot be read as a language model: {reason}") from error
        self._index = {word: index for index, word in enumerate(found)}
        self.words = frozenset(found) - {*SPECIAL, UNKNOWN.upper()}

    def index(self, word: str) -> int:
        """Gives the number of a word in `kenlm`, that of `<unk>` for a word that is not known."""
        return self._index[word if word in self.words else UNKNOWN]

    def start(self, in_text: bool = False) -> Any:
        """Gives the state at the beginning of a text; with `in_text` that in a text after words that are not known."""
        return self.kenlm.start(in_text)

    def score(self, state: Any, word: str) -> tuple[Any, float]:
        """Gives the state after one more word, and the log probability of the word."""
        after, log10 = self.kenlm.score(state, self.index(word))
        return after, LN10 * log10

    def finish(self, state: Any) -> float:
        """Gives the log probability that the text ends here."""
        return LN10 * self.kenlm.finish(state)[1]


def _words_of(path: Path) -> list[str]:
    """Words of a language model: the unigrams of an ARPA file, or the list at the end of a binary file of KenLM."""
    words = []
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if head == b"mmap lm ":
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    if (first := content.rfind(b"<unk>\0")) >= 0:
                        return content[first:].decode().rstrip("\0").split("\0")
                raise ValueError(f"{path} was built without its words: give the ARPA file.")
        with (gzip.open if head.startswith(b"\x1f\x8b") else open)(path, "rt", encoding="utf-8") as lines:
            section = ""
            for line in lines:
                if line.startswith("\\"):
                    section = line.strip()
                fields = re.split(r"[ \t\r\n]+", line)
                if section == "\\1-grams:" and len(fields) > 2:
                    words.append(fields[1])
                elif section == "\\2-grams:":
                    break
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is neither an ARPA file in UTF-8 nor a binary file of KenLM: {error}") from error
    return words


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
        >>> from favor.models.speech import write_arpa
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
    """Counts the different words before each n-gram, in `longer`; one that begins a text keeps its count."""
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
