"""A preparation that remembers what it has seen, and survives being killed."""

import json
import os
import signal

import launching
import pytest
from speech_corpus import librispeech, rows, write_manifest, write_sound

from favor.train.speech import prepare as speech_prepare
from favor.train.speech.data import Skipped, read_audio
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
    found, skipped = load_speech(mixed, "dev", max_bad=limit, prepared=tmp_path / "ready")
    assert [one.id for one in found] == ["12-112-0001", "12-112-0003"]
    assert [name.split()[0] for name in skipped.reasons] == ["7-107-0000", "7-107-0002"]
    assert "7-107-0000.flac): the file is empty" in skipped.describe()
    assert "7-107-0002.flac): cannot be decoded" in skipped.describe()


@pytest.mark.parametrize("limit", [0, 1, 0.25])
def test_bad_files_over_the_limit(mixed, limit):
    name = "7-107-0002" if limit else "7-107-0000"
    with pytest.raises(ValueError, match=rf"(?s)cannot be used \(max_bad is {limit}\).*{name}"):
        load_speech(mixed, "dev", max_bad=limit)


def test_a_second_preparation_does_nothing(corpus, tmp_path, monkeypatch):
    seen = counted(monkeypatch)
    utterances = read_librispeech(corpus, "dev")
    first = prepare(utterances, tmp_path)
    assert seen == [one.id for one in utterances]
    content = (tmp_path / "checked.jsonl").read_bytes()
    assert prepare(utterances, tmp_path) == first
    assert len(seen) == 4
    assert (tmp_path / "checked.jsonl").read_bytes() == content
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["checked.jsonl"]


def test_what_has_changed_is_decoded_again(corpus, tmp_path, monkeypatch):
    utterances = read_librispeech(corpus, "dev")
    prepare(utterances[:3], tmp_path)
    write_sound(utterances[1].audio, 2.0)
    seen = counted(monkeypatch)
    again = prepare(utterances, tmp_path)
    assert seen == [utterances[1].id, utterances[3].id]
    assert [one.seconds for one in again] == [0.8, 2.0, 1.0, 1.2]


def test_bad_files_are_remembered(mixed, tmp_path, monkeypatch):
    utterances = read_librispeech(mixed, "dev")
    with pytest.raises(ValueError, match=r"7-107-0000"):
        prepare(utterances, tmp_path)
    seen = counted(monkeypatch)
    with pytest.raises(ValueError, match=r"7-107-0002"):
        prepare(utterances, tmp_path, skipped=Skipped(1))
    assert seen == ["7-107-0002"]
    skipped = Skipped(2)
    assert len(prepare(utterances, tmp_path, skipped=skipped)) == 2
    assert len(prepare(utterances, tmp_path, skipped=Skipped(2))) == 2
    assert len(skipped) == 2
    assert len(seen) == 1


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


def test_lengths_of_the_source_are_compared(tmp_path):
    lines = rows(tmp_path, 2)
    lines[1]["seconds"] = 3.0
    file = write_manifest(tmp_path / "a.jsonl", lines)
    with pytest.raises(ValueError, match=r"lasts 0.60 s, but the source says 3.00 s"):
        load_speech(file)


def test_ids_must_differ(tmp_path):
    lines = rows(tmp_path, 2)
    file = write_manifest(tmp_path / "a.jsonl", [*lines, lines[0]])
    with pytest.raises(ValueError, match=r"audio/0.wav comes twice"):
        load_speech(file)


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
