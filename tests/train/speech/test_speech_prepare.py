"""What was decoded is remembered, also after a kill; tar shards hold the utterances of their folder."""

import dataclasses
import gzip
import json
import os
import signal
import tarfile

import launching
import numpy as np
import pytest
from speech_corpus import assert_told, librispeech, members, rows, write_manifest, write_shard, write_sound

from favor.train.speech import prepare as speech_prepare
from favor.train.speech.data import Skipped, read_audio
from favor.train.speech.manifests import StoredMember, read_shards
from favor.train.speech.prepare import prepare
from favor.train.speech.sources import load_speech, read_librispeech


@pytest.fixture
def corpus(tmp_path):
    return librispeech(tmp_path / "corpus")


def counted(monkeypatch):
    """Ids of the utterances that `prepare` decodes from now on."""
    seen = []

    def read(utterance, rate):
        seen.append(utterance.id)
        return read_audio(utterance, rate)

    monkeypatch.setattr(speech_prepare, "read_audio", read)
    return seen


@pytest.fixture
def mixed(corpus):
    """A corpus with two bad files."""
    chapter = corpus / "LibriSpeech" / "dev" / "7" / "107"
    (chapter / "7-107-0000.flac").write_bytes(b"")
    with (chapter / "7-107-0002.flac").open("r+b") as stream:
        stream.truncate(5000)
    return corpus


@pytest.mark.parametrize("limit", [2, 0.5, 1.0])
def test_bad_files_up_to_a_limit(mixed, limit, tmp_path):
    for less, name in ((0, "7-107-0000"), (1, "7-107-0002"), (0.25, "7-107-0002")):
        with pytest.raises(ValueError, match=rf"(?s)cannot be used \(max_bad is {less}\).*{name}"):
            load_speech(mixed, "dev", max_bad=less)
    found, skipped = load_speech(mixed, "dev", max_bad=limit, prepared=tmp_path / "ready")
    assert [one.id for one in found] == ["12-112-0001", "12-112-0003"]
    assert [name.split()[0] for name in skipped.reasons] == ["7-107-0000", "7-107-0002"]
    assert "7-107-0000.flac): the file is empty" in skipped.describe()
    assert "7-107-0002.flac): cannot be decoded" in skipped.describe()


def test_what_was_decoded_is_known_until_its_file_changes(corpus, tmp_path, monkeypatch):
    seen, utterances = counted(monkeypatch), read_librispeech(corpus, "dev")
    first = prepare(utterances[:3], tmp_path)
    content = (tmp_path / "checked.jsonl").read_bytes()
    assert prepare(utterances[:3], tmp_path) == first
    assert (tmp_path / "checked.jsonl").read_bytes() == content
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["checked.jsonl"]
    write_sound(utterances[1].audio, 2.0)
    assert [one.seconds for one in prepare(utterances, tmp_path)] == [0.8, 2.0, 1.0, 1.2]
    assert seen == [utterances[number].id for number in (0, 1, 2, 1, 3)]


def test_bad_files_are_remembered(mixed, tmp_path, monkeypatch):
    utterances, skipped = read_librispeech(mixed, "dev"), Skipped(2)
    with pytest.raises(ValueError, match=r"7-107-0000"):
        prepare(utterances, tmp_path)
    seen = counted(monkeypatch)
    with pytest.raises(ValueError, match=r"7-107-0002"):
        prepare(utterances, tmp_path, skipped=Skipped(1))
    for own in (skipped, Skipped(2)):
        assert len(prepare(utterances, tmp_path, skipped=own)) == 2
    assert len(skipped) == 2
    assert seen == ["7-107-0002"]


def test_other_settings_are_refused(corpus, tmp_path):
    utterances = read_librispeech(corpus, "dev")
    prepare(utterances, tmp_path)
    with (tmp_path / "checked.jsonl").open("a") as stream:
        stream.write("not ours")
    before = (tmp_path / "checked.jsonl").read_text()
    with pytest.raises(ValueError, match=r"was made with .*'sampling_rate': 16000.*not with .*'sampling_rate': 8000"):
        prepare(utterances, tmp_path, sampling_rate=8000)
    assert (tmp_path / "checked.jsonl").read_text() == before
    (tmp_path / "checked.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="is damaged"):
        prepare(utterances, tmp_path)


def test_what_a_manifest_says_wrongly(tmp_path):
    first, second = rows(tmp_path, 2)
    with pytest.raises(ValueError, match=r"lasts 0.60 s, but the source says 3.00 s"):
        load_speech(write_manifest(tmp_path / "a.jsonl", [first, second | {"seconds": 3.0}]))
    with pytest.raises(ValueError, match=r"audio/0.wav comes twice"):
        load_speech(write_manifest(tmp_path / "a.jsonl", [first, second, first]))


def killed_at_the_third(folder, utterances):
    """Runs in a process of its own: prepares one utterance after the other, and dies in the middle of a line."""
    calls, read = [], speech_prepare.read_audio

    def read_or_die(utterance, rate):
        calls.append(utterance)
        if len(calls) == 3:
            with (folder / "checked.jsonl").open("a") as stream:
                stream.write('{"id": "half a li')
            os.kill(os.getpid(), signal.SIGKILL)
        return read(utterance, rate)

    speech_prepare.read_audio, speech_prepare.CHUNK = read_or_die, 1
    prepare(utterances, folder)


def test_a_killed_preparation_goes_on(corpus, tmp_path, monkeypatch):
    ready, utterances = tmp_path / "ready", read_librispeech(corpus, "dev")
    process = launching._context.Process(target=killed_at_the_third, args=(ready, utterances))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    seen = counted(monkeypatch)
    found = prepare(utterances, ready)
    assert seen == ["7-107-0000", "7-107-0002"]
    assert found == prepare(utterances)
    lines = (ready / "checked.jsonl").read_text().splitlines()
    assert [json.loads(line).get("id") for line in lines[1:]] == [one.id for one in found]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return load_speech(librispeech(tmp_path_factory.mktemp("corpus"), lengths=(1.0, 0.8, 1.2, 0.7, 0.5, 0.9)), "dev")[0]


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
    with pytest.raises(ValueError, match=r"or tar shards, got 'test'; there are: dev-000000\.tar, dev-000001\.tar\."):
        load_speech(shards, "test")


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
    reasons |= {"json": "property name", "none": "empty after", "link": "is a link", "long": "says 9.00 s"}
    reasons |= {"deep": "nested too deeply", "bytes": "can't decode byte", "piece": "offset is for manifests"}
    assert_told({n.split("/")[-1].split(".")[0]: reason for n, reason in skipped.reasons.items()}, reasons)
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


def test_lengths_of_unchanged_members_are_known(shards, tmp_path, monkeypatch):
    first, _ = load_speech(shards, "dev", prepared=tmp_path)
    monkeypatch.setattr(StoredMember, "read", lambda self: pytest.fail("decoded again"))
    assert load_speech(shards, "dev", prepared=tmp_path)[0] == first
    changed = [dataclasses.replace(one, audio=dataclasses.replace(one.audio, size=7)) for one in first]
    with pytest.raises(pytest.fail.Exception, match="decoded again"):
        prepare(changed, tmp_path / "dev")
