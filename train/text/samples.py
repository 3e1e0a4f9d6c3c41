"""Text files of other people, line by line or as sequences of tokens, cut into samples of equal length."""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from favor_command.saved import check_known

if TYPE_CHECKING:
    from favor.train.text.stream import Stream

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


def open_lines(path: Path, newline: str | None = None) -> Any:
    """Opens a text file, plain or gzip, without its byte order mark, so that a bad byte spoils its own line alone.

    A byte that is not UTF-8 is a lone surrogate in its line; `is_text` finds it.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def is_text(text: str) -> bool:
    """Tells whether a text is one: it has no NUL, and no byte that is not UTF-8."""
    return _NO_TEXT.search(text) is None


def read_text(path: str | Path, max_characters: int | None = None) -> str:
    """Reads the text of a UTF-8 file, plain or compressed (.gz, .xz).

    Raises ValueError if the file is missing, empty, or not such a text.
    """
    path = Path(path)
    with _text_of(path) as stream:
        text = stream.read(-1 if max_characters is None else max_characters)
    if not text.strip():
        raise ValueError(f"{path} holds no text")
    return text


def check_text(path: str | Path) -> None:
    """Raises ValueError as `read_text` does, but reads only up to the first line that is not blank."""
    with _text_of(Path(path)) as stream:
        if not any(line.strip() for line in stream):
            raise ValueError(f"{path} holds no text")


@contextmanager
def _text_of(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"expected a text file, got {path}, which is {'a folder' if path.is_dir() else 'not there'}")
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as stream:
            yield stream
    except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error


class Plain(Dataset[dict[str, Tensor]]):
    """Samples `[n, length]`, the same in every epoch, as arguments of a model; their labels are their own tokens."""

    def __init__(self, ids: Tensor | Stream, labels: bool = False) -> None:
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, visit: int) -> dict[str, Tensor]:
        ids = self.ids[visit % len(self.ids)]
        return {"input_ids": ids, "labels": ids} if self.labels else {"input_ids": ids}


def samples(path: str | Path, tokenizer: Any, length: int, number: int | None, seed: int = 0) -> Tensor:
    """Cuts a text into samples of `length` tokens `[n, length]`, each with the tokenizer's special tokens around it.

    The samples are `number` ones, evenly spaced over the text, or all that do not overlap (None), in an order of the
    seed. Raises ValueError if the text is shorter than one sample, or the tokenizer does not know it.
    """
    before, after = around(tokenizer)
    ids = tokenizer(read_text(path), add_special_tokens=False, verbose=False)["input_ids"]
    check_known([ids], tokenizer, str(path))
    width = length - len(before) - len(after)
    available = len(ids) // width if width > 0 else 0
    if available < 1:
        raise ValueError(f"{path} has {len(ids)} tokens, too few for one sample of {length}: give a longer text")
    places = torch.arange(available)
    if number is not None and number < available:
        places = (torch.arange(number) * available) // number
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    return torch.tensor([before + ids[p * width : (p + 1) * width] + after for p in places[order].tolist()])


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Finds the special tokens that a tokenizer puts before and after a text."""
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
    if not bare or not starts:
        raise ValueError(f"cannot tell the special tokens of {type(tokenizer).__name__} from those of a text")
    start = starts[0]
    return whole[:start], whole[start + len(bare) :]
