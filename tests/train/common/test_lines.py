"""Text files that other people made."""

import gzip
import lzma
from pathlib import Path

import pytest

from favor.eval.papers.datasets import read_rows
from favor.models.speech import Pronunciations
from favor.train.text.samples import is_text, open_lines, read_text


@pytest.mark.parametrize(
    ("name", "content", "read", "expected"),
    [
        ("a.txt", "GO HER", read_text, "GO HER"),
        ("a.txt.gz", "GO HER", read_text, "GO HER"),
        ("a.txt.xz", "GO HER", read_text, "GO HER"),
        ("lexicon.txt", "GO\tG OU\r\n", lambda path: list(Pronunciations(path).spoken), ["GO"]),
        ("table.csv", "1,2\r\n3,4\r\n", read_rows, [["1", "2"], ["3", "4"]]),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, content, read, expected):
    """Manifests and GLUE's tables are tested with their readers."""
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(content.encode("utf-8-sig")))
    assert read(tmp_path / name) == expected


def test_bad_bytes_spoil_their_own_line(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\xff\ntw\xc3\xb6\n\0")
    with open_lines(tmp_path / "a") as lines:
        read = [line.strip() for line in lines]
    assert (read[0], read[2], [is_text(line) for line in read]) == ("one", "tw\u00f6", [True, False, True, False])
