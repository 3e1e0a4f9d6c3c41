"""Tar shards hold the utterances of the folder that they were made from, and what is wrong in them is named."""

import dataclasses
import gzip
import json
import tarfile

import numpy as np
import pytest
import torch
from speech_corpus import WORDS, librispeech, write_manifest, write_shard

from favor.models.conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train.speech.batches import SpeechDataset
from favor.train.speech.data import Skipped, read_audio
from favor.train.speech.manifests import StoredMember, read_shards
from favor.train.speech.prepare import prepare
from favor.train.speech.sources import load_speech

LENGTHS = (1.0, 0.8, 1.2, 0.7, 0.5, 0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return librispeech(tmp_path_factory.mktemp("corpus"), lengths=LENGTHS)


@pytest.fixture(scope="module")
def expected(folder):
    return load_speech(folder, "dev")[0]


def members(utterances, told=True):
    """Audio with a JSON file, or with a text alone."""
    pairs = []
    for one in utterances:
        row = {"text": one.text, "id": one.id, "speaker": one.speaker, "chapter": one.chapter, "seconds": one.seconds}
        text = (".json", json.dumps(row)) if told else (".txt", one.text + "\n")
        pairs += [(one.id + ".flac", one.audio.read_bytes()), (one.id + text[0], text[1].encode())]
    return pairs


@pytest.fixture(scope="module")
def shards(expected, tmp_path_factory):
    """The corpus in two shards."""
    root = tmp_path_factory.mktemp("shards")
    write_shard(root / "dev-000000.tar", members(expected[:4]))
    write_shard(root / "dev-000001.tar", members(expected[4:]))
    return root


def test_shards_give_the_utterances_and_audio_of_the_folder(shards, expected):
    found, skipped = load_speech(shards, "dev")
    assert not skipped.reasons
    for one, other in zip(found, expected, strict=True):
        assert dataclasses.replace(one, audio=b"") == dataclasses.replace(other, audio=b"")
        np.testing.assert_array_equal(read_audio(one), read_audio(other))
    assert found == load_speech(shards)[0]
    assert str(found[5].audio) == f"{shards / 'dev-000001.tar'}/{expected[5].id}.flac"


def test_samples_of_shards_are_those_of_the_folder_in_any_order(shards, expected):
    processor = ConformerProcessor(ConformerFeatureExtractor(), train_tokenizer([" ".join(WORDS)], "char"))
    given = {"speeds": (0.9, 1.0, 1.1), "dither": 1e-3, "seed": 3}
    one = SpeechDataset(load_speech(shards, "dev")[0], processor, **given)
    other = SpeechDataset(expected, processor, **given)
    for key in ((1, 5), (0, 2), (1, 0), (0, 5)):
        assert torch.equal(one[key]["input_features"], other[key]["input_features"])
        assert torch.equal(one[key]["labels"], other[key]["labels"])


@pytest.mark.parametrize("place", ["train/shard-{}.tar", "train-{}.tar", "{}.tar"])
def test_where_shards_may_be(tmp_path, expected, place):
    for number, half in enumerate((expected[:3], expected[3:])):
        write_shard(tmp_path / place.format(f"{number:06d}"), members(half, told=False))
    write_shard(tmp_path / "train-clean" / "shard-000000.tar", members(expected[:1]))
    if place == "train-{}.tar":
        write_shard(tmp_path / "train-clean-000000.tar", members(expected[:1]))
    found, _ = load_speech(tmp_path, "train" if place.startswith("train") else None)
    assert [one.text for one in found] == [one.text for one in expected]
    names = [f"{place[:-4].format(f'{row // 3:06d}')}/{one.id}" for row, one in enumerate(expected)]
    assert [one.id for one in found] == names


def test_a_split_that_is_not_there(shards):
    with pytest.raises(ValueError, match=r"or tar shards, got 'test'; there are: dev-000000\.tar, dev-000001\.tar\."):
        load_speech(shards, "test")


def test_one_shard_and_a_manifest_of_shards(shards, expected, tmp_path):
    assert [one.id for one in load_speech(shards / "dev-000001.tar")[0]] == [one.id for one in expected[4:]]
    lines = [{"audio": str(shards / "dev-000001.tar")}]
    lines += [{"audio": str(one.audio), "text": one.text, "id": one.id} for one in expected[:2]]
    found, _ = load_speech(write_manifest(tmp_path / "list.jsonl", lines))
    assert [one.id for one in found] == [one.id for one in [*expected[4:], *expected[:2]]]
    (tmp_path / "table.csv").write_text(f"audio,text\n{shards / 'dev-000000.tar'},\n")
    assert load_speech(tmp_path / "table.csv")[0] == load_speech(shards / "dev-000000.tar")[0]
    with pytest.raises(ValueError, match=r"none\.tar: is no tar file, .*No such file"):
        load_speech(write_manifest(tmp_path / "list.jsonl", [{"audio": "none.tar"}]))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path, expected, form):
    audio, name = expected[0].audio.read_bytes(), "./" + "long/" * 40 + "Zoë"
    pairs = [(name + ".FLAC", audio), (name + ".txt", b"GO"), ("a/.hidden.flac", b""), ("a/x.cls", b"7")]
    (found,), _ = load_speech(write_shard(tmp_path / "x.tar", pairs, form))
    assert found.id == "x/" + name[2:]
    np.testing.assert_array_equal(read_audio(found), read_audio(expected[0]))


def test_bad_members_are_named_and_counted(tmp_path, expected):
    audio = expected[0].audio.read_bytes()
    pairs = [("good.flac", audio), ("good.txt", b"\xef\xbb\xbfGO"), ("both.flac", audio), ("both.txt", b"DO")]
    pairs += [("both.json", b'{"text": "NOT THIS"}')]
    pairs += [("alone.flac", audio), ("silent.txt", b"GO"), ("twice.flac", audio), ("twice.mp3", audio)]
    pairs += [("dots.en.flac", audio), ("dots.txt", b"GO"), ("list.flac", audio), ("list.json", b"[1]")]
    pairs += [("cut.flac", audio[:2000]), ("cut.txt", b"GO"), ("empty.flac", b""), ("empty.txt", b"GO")]
    pairs += [("json.flac", audio), ("json.json", b"{"), ("none.flac", audio), ("none.txt", b"42")]
    pairs += [("long.flac", audio), ("long.json", b'{"text": "GO", "seconds": 9}')]
    pairs += [("deep.flac", audio), ("deep.json", b"[" * 200000), ("bytes.flac", audio), ("bytes.txt", b"\xff")]
    pairs += [("piece.flac", audio), ("piece.json", b'{"text": "GO", "offset": 1}')]
    path = write_shard(tmp_path / "x.tar", pairs)
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("link.flac")
        link.type, link.linkname = tarfile.LNKTYPE, "good.flac"
        archive.addfile(link)
    found, skipped = load_speech(path, max_bad=14)
    assert [(one.id, one.text) for one in found] == [("x/good", "GO"), ("x/both", "DO")]
    reasons = {"alone": "no transcript", "silent": "no .flac, .mp3, .wav member", "twice": "twice.mp3 is a second"}
    reasons |= {"dots": "second dot", "list": "expected a JSON object", "cut": "decoded|cut short", "empty": "is empty"}
    reasons |= {
        "json": "property name",
        "none": "empty after normalisation",
        "link": "is a link",
        "long": "says 9.00 s",
        "deep": "nested too deeply",
        "bytes": "can't decode byte",
        "piece": "offset is for manifests",
    }
    told = {name.split("/")[-1].split(".")[0]: reason for name, reason in skipped.reasons.items()}
    assert told.keys() == reasons.keys()
    for name, part in reasons.items():
        assert any(one in told[name] for one in part.split("|")), (name, told[name])
    with pytest.raises(ValueError, match=r"14 cannot be used \(max_bad is 13\)"):
        load_speech(path, max_bad=13)
    plain = read_shards([path], tmp_path, Skipped(12), transcripts=False)
    assert [one.text for one in plain if one.id == "x/alone"] == [""]


def changed(content, size, kind):
    """The bytes of a tar file whose first member says another size and kind."""
    header = bytearray(content[:512])
    header[124:136], header[148:156], header[156:157] = size, b" " * 8, kind
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


def test_damaged_shards_are_refused(tmp_path, shards):
    whole = (shards / "dev-000000.tar").read_bytes()
    middle = whole.index(b"ustar", len(whole) // 2) - 257
    broken = {"cut": whole[:9000], "headless": whole[:middle], "half": whole[: middle + 100], "empty": b""}
    broken["header"] = whole[:middle] + b"x" * 512 + whole[middle + 512 :]
    broken["two"] = whole + whole
    # Sizes of 2**62 and -512 in binary and of 8 GB in digits, of a text, an extended header and a long name.
    for name, size in (("great", b"\x80" + (2**62).to_bytes(11, "big")), ("negative", b"\xff" * 10 + b"\xfe\0")):
        broken |= {f"{name}{kind}": changed(whole, size, kind.encode()) for kind in "0xL"}
    broken["digits"] = changed(whole, b"77777777777\0", b"x")
    broken["nested"] = tarfile.TarInfo("x").tobuf()[:156] + b"x" + tarfile.TarInfo("x").tobuf()[157:]
    broken["nested"] = changed(broken["nested"], b"0" * 11 + b"\0", b"x") * 5000 + whole
    for name, content in {**broken, "text": b"nothing like a tar file" * 100}.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.tar: is no tar file, or is damaged or cut short"):
            load_speech(path, max_bad=100)
    (tmp_path / "small.tar.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(ValueError, match=r"small\.tar\.gz: is compressed, .* decompress it to \.tar"):
        load_speech(tmp_path / "small.tar.gz")
    with pytest.raises(ValueError, match=r"found no \*\.flac, \*\.mp3 or \*\.wav in .*x\.tar"):
        load_speech(write_shard(tmp_path / "x.tar", [("a.cls", b"1")]))


def test_a_shard_that_has_changed_is_noticed(tmp_path, expected):
    path = write_shard(tmp_path / "x.tar", members(expected[:2], told=False))
    found, _ = load_speech(path, prepared=tmp_path / "ready")
    path.write_bytes(path.read_bytes()[: found[1].audio.offset + 100])
    with pytest.raises(ValueError, match=r"x.tar/.*: cannot be decoded: 100 of \d+ bytes are there"):
        read_audio(found[1])
    again = write_shard(path, members([expected[2], *expected[:2]], told=False))
    assert len(load_speech(again, prepared=tmp_path / "ready")[0]) == 3
    assert isinstance(found[0].audio, StoredMember)


def test_lengths_of_unchanged_members_are_known(shards, tmp_path, monkeypatch):
    first, _ = load_speech(shards, "dev", prepared=tmp_path)
    monkeypatch.setattr(StoredMember, "read", lambda self: pytest.fail("decoded again"))
    assert load_speech(shards, "dev", prepared=tmp_path)[0] == first
    changed = [dataclasses.replace(one, audio=dataclasses.replace(one.audio, size=7)) for one in first]
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        prepare(changed, tmp_path / "dev")
