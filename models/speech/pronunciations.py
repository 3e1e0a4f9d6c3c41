"""How words are spoken: a file of pronunciations, transcripts of phonemes, and the tokenizer of the phonemes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from favor.models.speech.tokenizer import SPACE, SPECIAL, ConformerTokenizer, tokenizer_of

LEXICON_FILE = "lexicon.txt"
BETWEEN = "-"  # between the phonemes of a word
LISTED = 20


class Pronunciations:
    r"""Words and how they are spoken, for a speech model whose tokens are phonemes.

    A word is written as its phonemes with hyphens between them: "GOOD DAY" is G-UH-D D-EY.

    Args:
        path: a text in UTF-8. Each line is a word, a tab, and its phonemes with spaces between them, such as
            `GOOD<TAB>G UH D`. A word may have several lines; the first is the pronunciation that `write` takes. If
            words sound alike, `read` takes the one that comes first in the file.

    Attributes:
        spoken: for each word its pronunciations, tuples of phonemes.

    Raises:
        ValueError: for a file that is missing, is empty, or has a line of another form.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from favor.models.speech import Pronunciations
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "lexicon.txt"
        ...     _ = path.write_text("GOOD\tG UH D\nDAY\tD EY\n")
        ...     spoken = Pronunciations(path)
        >>> spoken.write("GOOD DAY"), spoken.read("D-EY D-UH")
        ('G-UH-D D-EY', 'DAY D-UH')
    """

    def __init__(self, path: str | Path) -> None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"lexicon must be a text in UTF-8 with lines WORD<TAB>PH PH, got {path}: {error}"
            ) from error
        self.spoken: dict[str, list[tuple[str, ...]]] = {}
        for number, line in enumerate(lines, 1):
            word, tab, phonemes = line.partition("\t")
            one = tuple(phonemes.split())
            wrong = [phoneme for phoneme in one if phoneme in SPECIAL or BETWEEN in phoneme or SPACE in phoneme]
            if not tab or word.split() != [word] or not one or wrong:
                raise ValueError(
                    f"{path}, line {number}: must be a word, a tab and phonemes with spaces between them, without "
                    f"{BETWEEN!r}, {SPACE!r} and {', '.join(SPECIAL)}; got {line!r}."
                )
            own = self.spoken.setdefault(word, [])
            if one not in own:
                own.append(one)
        if not self.spoken:
            raise ValueError(f"{path} must hold at least one word.")
        self._words: dict[str, str] = {}
        for word, own in self.spoken.items():
            for one in own:
                self._words.setdefault(BETWEEN.join(one), word)

    def spellings(self, word: str) -> list[str]:
        """Writes each pronunciation of a word; none for a word that is not known."""
        return [BETWEEN.join(one) for one in self.spoken.get(word, ())]

    def missing(self, text: str) -> list[str]:
        """Lists the words of a text that are not known."""
        return [word for word in text.split() if word not in self.spoken]

    def write(self, text: str) -> str:
        """Writes a text of words as phonemes, by the first pronunciation of each word.

        Raises:
            ValueError: for words that are not known; the message names them.
        """
        if missing := self.missing(text):
            raise ValueError(lacking(missing))
        return " ".join(BETWEEN.join(self.spoken[word][0]) for word in text.split())

    def read(self, text: str) -> str:
        """Writes a text of phonemes as words; where no word has these phonemes, they stay."""
        return " ".join(self._words.get(one, one) for one in text.split())

    def tokenizer(self) -> ConformerTokenizer:
        """Makes a tokenizer of texts of phonemes: the special tokens, the space, and a token for each phoneme."""
        phonemes = sorted({phoneme for own in self.spoken.values() for one in own for phoneme in one})
        ids = {token: place for place, token in enumerate([*SPECIAL, SPACE, *phonemes])}
        backend = Tokenizer(WordLevel(ids, unk_token=SPECIAL[2]))
        backend.pre_tokenizer = pre_tokenizers.Split(BETWEEN, "removed")
        # Tokens with spaces between them, then hyphens in place of these, but for those around a space of the text.
        backend.decoder = decoders.Sequence(
            [
                decoders.WordPiece(cleanup=False),
                decoders.Fuse(),
                decoders.Replace(" ", BETWEEN),
                decoders.Replace(Regex(f"({BETWEEN}?{SPACE}{BETWEEN}?)+"), " "),
                decoders.Replace(Regex("^ +| +$"), ""),  # Strip panics at an empty text
            ]
        )
        between = normalizers.Replace(" ", f"{BETWEEN}{SPACE}{BETWEEN}"), normalizers.Prepend(f"{SPACE}{BETWEEN}")
        return tokenizer_of(backend, *between)

    def check(self, tokenizer: ConformerTokenizer) -> None:
        """Raises ValueError if none of the words can be written in the tokens of a model."""
        known = tokenizer.get_vocab()
        if not any(known.keys() >= {*one} for own in self.spoken.values() for one in own) or SPACE not in known:
            raise ValueError(
                "lexicon has no word whose phonemes are tokens of the model, which may write letters, or phonemes in "
                f"another way. One of its words is {next(iter(self.spoken))} {next(iter(self._words))}."
            )

    def save(self, folder: str | Path) -> Path:
        """Writes the file `lexicon.txt` in a folder, where `model.transcribe` finds it; gives its path."""
        path = Path(folder) / LEXICON_FILE
        write_lexicon({word: map(" ".join, own) for word, own in self.spoken.items()}, path)
        return path


def write_lexicon(spoken: Mapping[str, Iterable[str]], path: Path) -> None:
    """Writes the file that `Pronunciations` reads, from the pronunciations of each word, phonemes between spaces."""
    lines = [f"{word}\t{one}\n" for word, own in spoken.items() for one in own]
    path.write_text("".join(lines), encoding="utf-8")


def lexicon_of(lexicon: str | Path | Pronunciations | None, folder: str | Path | None) -> Pronunciations | None:
    """Gives the pronunciations that an option names, else those that were saved in the folder of a model, if any."""
    if isinstance(lexicon, Pronunciations):
        return lexicon
    if lexicon is None and folder and (Path(folder) / LEXICON_FILE).is_file():
        lexicon = Path(folder) / LEXICON_FILE
    return None if lexicon is None else Pronunciations(lexicon)


def lacking(words: Sequence[str]) -> str:
    """Gives the message for words without a pronunciation."""
    kinds = list(dict.fromkeys(words))
    more = f" and {len(kinds) - LISTED} more" if len(kinds) > LISTED else ""
    return (
        f"the lexicon lacks {len(kinds)} words of the transcripts: {', '.join(kinds[:LISTED])}{more}. Add a line "
        "WORD<TAB>PH PH for each; a letter-to-sound program can make them."
    )
