"""N-gram language models of words, in the files of KenLM."""

from __future__ import annotations

import gzip
import math
import mmap
import re
import zlib
from pathlib import Path
from typing import Any

from favor._parts import needs

BEGIN, END, UNKNOWN = SPECIAL = ("<s>", "</s>", "<unk>")
LN10 = math.log(10)


class NgramModel:
    """An n-gram language model of words, read and evaluated by KenLM (Heafield 2011). Needs the extra `lm`.

    Probabilities are natural logarithms. A word that the model does not know has the probability of `<unk>`. If the
    file has no `<unk>`, KenLM gives such words a probability of 10^-100, so that a search hardly ever finds them.

    Args:
        path: an ARPA file, also one compressed by gzip, or a binary file of KenLM. KenLM shows on standard error how
            far it has read an ARPA file; a binary file loads faster.

    Attributes:
        words: that the model knows, without `<s>`, `</s>` and `<unk>`.

    Raises:
        ImportError: if the package flashlight-text is not installed.
        ValueError: for a file that is missing or is no language model.

    Example:
        >>> import tempfile
        >>> from favor.models.conformer import NgramModel, write_arpa
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = NgramModel(write_arpa(["GOOD DAY", "GOOD MORNING"], f"{folder}/lm.arpa"))
        >>> sorted(model.words)
        ['DAY', 'GOOD', 'MORNING']
        >>> _, log_prob = model.score(model.start(), "GOOD")
        >>> _, less = model.score(model.start(), "DAY")
        >>> log_prob > less
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
            self._model = KenLM(str(path), Dictionary(found))
        except RuntimeError as error:
            reason = str(error).splitlines()[-1]
            raise ValueError(f"{path} cannot be read as a language model: {reason}") from error
        self._index = {word: index for index, word in enumerate(found)}
        self.words = frozenset(found) - {*SPECIAL, UNKNOWN.upper()}

    @property
    def kenlm(self) -> Any:
        """The model as flashlight-text has it, whose words are numbers and whose logarithms have the base 10."""
        return self._model

    def index(self, word: str) -> int:
        """Gives the number of a word in `kenlm`, that of `<unk>` for a word that is not known."""
        return self._index[word if word in self.words else UNKNOWN]

    def start(self, in_text: bool = False) -> Any:
        """Gives the state at the beginning of a text; with `in_text` that in a text after words that are not known."""
        return self._model.start(in_text)

    def score(self, state: Any, word: str) -> tuple[Any, float]:
        """Gives the state after one more word, and the log probability of the word."""
        after, log10 = self._model.score(state, self.index(word))
        return after, LN10 * log10

    def finish(self, state: Any) -> float:
        """Gives the log probability that the text ends here."""
        return LN10 * self._model.finish(state)[1]


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
