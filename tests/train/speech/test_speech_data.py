"""Readers of speech and what they refuse."""

import contextlib
import dataclasses
import io
import tracemalloc
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile
from speech_corpus import RATE, librispeech, rows, sound, transcript, write_manifest, write_sound

from favor.models.conformer.configuration_conformer import subsampled_frames
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, audio, read_file, train_tokenizer
from favor.models.speech.audio import read_piece
from favor.train.speech import sources as speech_sources
from favor.train.speech.data import Skipped, Utterance, check_lengths, needed_frames, read_audio
from favor.train.speech.manifests import read_manifest
from favor.train.speech.prepare import prepare
from favor.train.speech.sources import from_dataset, load_speech, read_audio_folder, read_hub, read_librispeech


@pytest.fixture
def corpus(tmp_path):
    return librispeech(tmp_path / "corpus")


@pytest.mark.parametrize("ending", [".flac", ".wav", ".mp3"])
@pytest.mark.parametrize("inner", [True, False])
def test_librispeech(tmp_path, ending, inner):
    folder = librispeech(tmp_path, ending=ending)
    found, skipped = load_speech(folder if inner else folder / "LibriSpeech", "dev")
    assert not skipped.reasons
    assert [one.id for one in found] == ["12-112-0001", "12-112-0003", "7-107-0000", "7-107-0002"]
    assert [one.speaker for one in found] == ["12", "12", "7", "7"]
    assert [one.chapter for one in found] == ["112", "112", "107", "107"]
    assert [one.text for one in found] == [transcript(number) for number in (1, 3, 0, 2)]
    assert [one.seconds for one in found] == [0.8, 0.7, 1.0, 1.2]
    samples = read_audio(found[0])
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, sound(0.8, 1), atol=0.05 if ending == ".mp3" else 1e-4)


def test_splits_are_joined(corpus):
    librispeech(corpus, "test", lengths=(0.5, 0.6), speakers=(8, 9))
    found, _ = load_speech(corpus, "dev+test", prepared=corpus / "ready")
    assert [one.seconds for one in found] == [0.8, 0.7, 1.0, 1.2, 0.5, 0.6]
    assert (corpus / "ready" / "dev+test" / "checked.jsonl").exists()


def test_librispeech_names_what_does_not_fit(corpus):
    chapter = corpus / "LibriSpeech" / "dev" / "7" / "107"
    write_sound(chapter / "7-107-0008.flac", 0.5)
    write_sound(chapter / "7-107-0000.wav", 0.5)
    with (chapter / "7-107.trans.txt").open("a") as stream:
        stream.write("7-107-0005 NO AUDIO\n7-107-0006\n")
    write_sound(chapter / "7-107-0006.flac", 0.5)
    (corpus / "LibriSpeech" / "dev" / "12" / "112" / "12-112.trans.txt").unlink()
    skipped = Skipped(10)
    assert [one.id for one in read_librispeech(corpus, "dev", skipped)] == ["7-107-0000", "7-107-0002"]
    told = {name.split()[0]: reason for name, reason in skipped.reasons.items()}
    assert "has the id of another file" in told["7-107-0000"]
    assert "no .flac" in told["7-107-0005"]
    assert "empty transcript" in told["7-107-0006"]
    for name in ("7-107-0008", "12-112-0001", "12-112-0003"):
        assert "no transcript" in told[name]
    assert len(told) == 6
    with pytest.raises(ValueError, match=r"12-112-0001 \(.*: has no transcript"):
        read_librispeech(corpus, "dev")


def test_transcripts_with_bad_bytes_are_counted(corpus):
    """A byte order mark and a line end of another system do not spoil a name, and one bad byte only its own line."""
    chapter = corpus / "LibriSpeech" / "dev" / "7" / "107"
    file = chapter / "7-107.trans.txt"
    file.write_bytes("7-107-0000 GO\x85 HER\r\n7-107-0002 D".encode("utf-8-sig") + b"\xff\r\n")
    with pytest.raises(ValueError, match=r"'7-107-0002' .*not UTF-8"):
        read_librispeech(corpus, "dev")
    found = read_librispeech(corpus, "dev", Skipped(1))
    assert [one.text for one in found if one.speaker == "7"] == ["GO HER"]
    (chapter / "\udcff.wav").touch()
    with pytest.raises(ValueError, match="names of files must be UTF-8"):
        read_audio_folder(corpus)


def test_librispeech_without_the_split(corpus):
    with pytest.raises(ValueError, match=r"split must be a folder of .*, got 'train'; there are: dev"):
        read_librispeech(corpus, "train")
    (corpus / "LibriSpeech" / "empty" / "1" / "2").mkdir(parents=True)
    with pytest.raises(ValueError, match="found no <speaker>/<chapter>"):
        read_librispeech(corpus, "empty")


def test_manifest_in_json_and_csv(tmp_path):
    lines = rows(tmp_path)
    lines[1] |= {"id": "one", "seconds": 0.6, "speaker": 4, "chapter": "c"}
    file = write_manifest(tmp_path / "train.jsonl", lines)
    header = "audio,text,id,seconds,speaker,chapter\n"
    table = [f'{one["audio"]},"{one["text"]}",{"one,0.6,4,c" if "id" in one else ",,,"}\n' for one in lines]
    (tmp_path / "train.csv").write_text(header + "".join(table))
    found = read_manifest(file)
    assert found == read_manifest(tmp_path / "train.csv")
    assert [one.id for one in found] == ["audio/0.wav", "one", "audio/2.wav"]
    assert [one.text for one in found] == [transcript(number) for number in range(3)]
    assert (found[1].seconds, found[1].speaker, found[1].chapter) == (0.6, "4", "c")
    assert found[2].speaker is None
    good, _ = load_speech(file)
    assert [one.seconds for one in good] == [0.5, 0.6, 0.7]


OTHERS = {
    "nemo.jsonl": [
        '{"audio_filepath": "clips/long.mp3", "text": "go her", "duration": 0.5, "offset": 0.25, "lang": "en"}',
        '{"audio_filepath": "clips/long.mp3", "text": "do", "duration": 0.4, "offset": 1}',
    ],
    "common_voice.tsv": [
        "client_id\tpath\tsentence\tup_votes\taccents",
        'a1b2\tlong.mp3\t"Go," he said.\t2\t',
        "a1b2\tclips/two.wav\tDo it\t2\t",
    ],
}


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", OTHERS)
def test_manifests_as_other_projects_write_them(tmp_path, name, line_end):
    """With a byte order mark, which would spoil the first name, and pieces of a longer recording."""
    write_sound(tmp_path / "clips" / "long.mp3", 2.0)
    write_sound(tmp_path / "clips" / "two.wav", 0.5, 1)
    (tmp_path / name).write_bytes(line_end.join([*OTHERS[name], ""]).encode("utf-8-sig"))
    found, _ = load_speech(tmp_path, Path(name).stem, prepared=tmp_path / "ready")
    whole = read_audio(tmp_path / "clips" / "long.mp3")
    if name == "nemo.jsonl":
        assert [(one.id, one.text) for one in found] == [
            ("clips/long.mp3@0.25", "GO HER"),
            ("clips/long.mp3@1.0", "DO"),
        ]
        assert [one.seconds for one in found] == [0.5, 0.4]
        np.testing.assert_allclose(read_audio(found[0]), whole[4000:12000], atol=1e-6)
        np.testing.assert_allclose(read_audio(found[1]), whole[16000:22400], atol=1e-6)
        moved = OTHERS[name][1].replace('"offset": 1', '"offset": 1.8')
        (tmp_path / name).write_text("\n".join([OTHERS[name][0], moved, moved.replace("1.8", "1e305")]))
        _, skipped = load_speech(tmp_path, "nemo", prepared=tmp_path / "ready", max_bad=2)
        assert "lasts 0.20 s, but the source says 0.40 s" in skipped.describe()
        assert "begins after 1e+305 s of 2.00 s" in skipped.describe()
    else:
        assert [(one.id, one.text) for one in found] == [("long.mp3", "GO HE SAID"), ("clips/two.wav", "DO IT")]
        assert [one.speaker for one in found] == ["a1b2", "a1b2"]
        np.testing.assert_array_equal(read_audio(found[0]), whole)


def test_manifest_in_a_folder(tmp_path):
    lines = rows(tmp_path)
    write_manifest(tmp_path / "train.jsonl", lines)
    assert len(read_manifest(tmp_path)) == 3
    (tmp_path / "train").mkdir()
    assert len(load_speech(tmp_path, "train")[0]) == 3
    write_manifest(tmp_path / "test.jsonl", lines[:1])
    assert len(load_speech(tmp_path, "test")[0]) == 1
    write_manifest(tmp_path / "dev" / "list.jsonl", [{"audio": str(tmp_path / "audio/0.wav"), "text": "A"}])
    assert len(load_speech(tmp_path, "dev")[0]) == 1
    with pytest.raises(ValueError, match=r"expected one .* found test.jsonl, train.jsonl"):
        read_manifest(tmp_path)
    with pytest.raises(ValueError, match=r"expected other.jsonl, .* found test.jsonl, train.jsonl"):
        read_manifest(tmp_path, split="other")
    with pytest.raises(ValueError, match="split must be None for a manifest file"):
        load_speech(tmp_path / "train.jsonl", "train")
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz: is compressed"):
        read_manifest(tmp_path / "x.jsonl.gz")
    with pytest.raises(ValueError, match="does not exist"):
        read_manifest(tmp_path / "nothing.jsonl")


def test_manifest_names_bad_rows(tmp_path):
    good = rows(tmp_path, 1)
    bad = [{"text": "A"}, {"audio": "x.wav"}, {"audio": "x.wav", "text": "42"}, [1]]
    bad.append({**good[0], "id": "other", "seconds": "long"})
    bad += [{**good[0], "seconds": 10**400}, {**good[0], "offset": -1}, {**good[0], "speaker": [[]]}]
    bad += [{**good[0], "text": "GO\ud800"}, {"audio": "a\0.wav", "text": "GO"}]
    file = write_manifest(tmp_path / "all.jsonl", [*good, *bad])
    more = [b"not json", b"[" * 200000, b"[" * 400 + b"]" * 400, b'{"audio": "\xff.wav", "text": "GO"}', b""]
    file.write_bytes(file.read_bytes() + b"\n".join(more))
    skipped = Skipped(20)
    assert len(read_manifest(file, skipped)) == 1
    assert list(skipped.reasons) == [f"{file}:{line}" for line in range(2, 16)]
    assert max(map(len, skipped.reasons.values())) < 200
    words = (
        "audio must be given",
        "text must be given",
        "empty after normalisation",
        "JSON object",
        "seconds must be a number of seconds, got 'long'",
        "seconds must be a number of seconds, got 1000",
        "offset must be a number of seconds, got -1",
        "speaker must be a text in UTF-8",
        "text must be a text in UTF-8",
        "audio must be a text in UTF-8",
        "not json",
        "JSON object",
        "JSON object",
        "audio must be a text in UTF-8",
    )
    for reason, word in zip(skipped.reasons.values(), words, strict=True):
        assert word in reason
    with pytest.raises(ValueError, match=r"all.jsonl:2: audio must be given"):
        read_manifest(file)
    with pytest.raises(ValueError, match="expected rows with the columns audio and text"):
        read_manifest(write_manifest(tmp_path / "none.jsonl", []))


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_hostile_rows_of_tables_are_counted(tmp_path, ending):
    """A field longer than csv reads, bytes that are no text, a quote without an end, a name longer than a file's."""
    end = b"," if ending == ".csv" else b"\t"
    rows(tmp_path, 1)
    lines = [b"x" * 200000 + end + b"GO", b"audio/\xff.wav" + end + b"GO", b"a\0" + end + b"GO", b"a" + end]
    lines += [end.join([b"a", b"GO", b"HER"]), b"a" * 5000 + end + b"GO", b"audio/0.wav" + end + b"GO"]
    if ending == ".csv":
        lines += [b'b,"GO\nc,GO']
    file = tmp_path / f"all{ending}"
    file.write_bytes(b"\n".join([end.join([b"path", b"text"]), *lines]))
    found, skipped = load_speech(file, max_bad=10)
    assert [one.id for one in found] == ["audio/0.wav"]
    told = [("field larger", "2"), ("UTF-8", "3"), ("UTF-8", "4"), ("text must be given", "5"), ("more fields", "6")]
    told += [("unexpected end", "10")] if ending == ".csv" else []
    for (name, reason), (word, line) in zip(skipped.reasons.items(), told, strict=False):
        assert name == f"{file}:{line}"
        assert word in reason
    assert list(skipped.reasons.values())[len(told) :][0].startswith("cannot be decoded: ")
    assert len(skipped) == len(told) + 1


@pytest.fixture
def dataset(corpus):
    """As the hub has it: audio in the rows or in files."""
    files = sorted(corpus.rglob("*.flac"))
    audio = [{"path": str(files[0]), "bytes": None}]
    audio += [{"path": file.name, "bytes": file.read_bytes()} for file in files[1:]]
    columns = {
        "audio": audio,
        "text": [transcript(number) for number in (1, 3, 0, 2)],
        "id": [file.stem for file in files],
        "speaker_id": [12, 12, 7, 7],
        "chapter_id": [112, 112, 107, 107],
    }
    built = datasets.Dataset.from_dict(columns)
    features = datasets.Features({**built.features, "audio": datasets.Audio(sampling_rate=RATE, decode=False)})
    return built.cast(features)


def test_dataset_of_the_hub(dataset, corpus, tmp_path):
    found = prepare(from_dataset(dataset))
    expected, _ = load_speech(corpus, "dev")
    for one, other in zip(found, expected, strict=True):
        assert dataclasses.replace(one, audio=b"") == dataclasses.replace(other, audio=b"")
        np.testing.assert_array_equal(read_audio(one), read_audio(other))
    (tmp_path / "hub").mkdir()
    dataset.to_parquet(tmp_path / "hub" / "validation.parquet")
    again = read_hub(str(tmp_path / "hub"), split="validation")
    assert [one.id for one in again] == [one.id for one in expected]
    np.testing.assert_array_equal(read_audio(again[1]), read_audio(expected[1]))
    assert str(again[1].audio).startswith("row 1 of")


def test_hub_is_asked_for_other_names(dataset, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(speech_sources, "load_dataset", lambda *args, **given: asked.append((args, given)) or dataset)
    found, _ = load_speech("openslr/librispeech_asr:clean", "validation+test", prepared=tmp_path)
    assert asked == [(("openslr/librispeech_asr", "clean"), {"split": "validation+test"})]
    assert len(found) == 4
    with pytest.raises(ValueError, match="split must be given"):
        read_hub("openslr/librispeech_asr")


def test_dataset_without_ids_or_texts(dataset):
    bare = from_dataset(dataset.select_columns(["audio", "text"]))
    assert [one.id for one in bare] == ["0", "1", "2", "3"]
    assert bare[0].speaker is None
    empty = dataset.map(lambda row, number: {"text": "" if number == 2 else row["text"]}, with_indices=True)
    with pytest.raises(ValueError, match=r"row 2 of .*: has an empty transcript"):
        from_dataset(empty)
    with pytest.raises(ValueError, match="must have the columns audio and text, got audio, id"):
        from_dataset(dataset.select_columns(["audio", "id"]))


def encoded(samples, rate=RATE, form="FLAC"):
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=form)
    return stream.getvalue()


def unfinished_flac():
    """A FLAC whose header promises more than there is, cut between two blocks."""
    content = bytearray(encoded(sound(1.0)))
    # 36 bits of STREAMINFO, from byte 21 on, hold the number of samples.
    content[22:26] = (2 * RATE).to_bytes(4, "big")
    return bytes(content)


BAD_FILES = {
    "empty": (b"", "the file is empty"),
    "header alone": (encoded(np.zeros(0, np.float32), form="WAV"), "holds no samples"),
    "text": (b"this is not audio at all" * 20, "cannot be decoded"),
    "cut": (encoded(sound(1.0))[:9000], "cannot be decoded|cut short"),
    "promises": (unfinished_flac(), "cut short: 16000 of 32000|cannot be decoded"),
    "cut mp3": (encoded(sound(2.0), form="MP3")[:3000], "cut short"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_audio_is_named(tmp_path, kind):
    content, message = BAD_FILES[kind]
    path = tmp_path / "some.flac"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"some.flac: .*({message})"):
        read_audio(path)
    with pytest.raises(ValueError, match=f"bytes: .*({message})"):
        read_audio(content)


def test_one_missing_sample_is_noticed(monkeypatch):
    """Of a file that decodes without an error, as a cut MP3 does."""
    monkeypatch.setattr(audio, "_decode", lambda stream, *_: stream.read(RATE - 1, dtype="float32"))
    with pytest.raises(ValueError, match="cut short: 15999 of 16000 samples can be decoded"):
        read_audio(encoded(sound(1.0)))


def test_samples_that_are_not_finite(tmp_path):
    soundfile.write(tmp_path / "x.wav", np.full(2000, np.nan, np.float32), RATE, subtype="FLOAT")
    with pytest.raises(ValueError, match=r"x.wav: holds samples that are not finite"):
        read_audio(tmp_path / "x.wav")


def test_channels_and_rates(tmp_path):
    stereo = np.stack([sound(0.5, 1), sound(0.5, 2)], 1)
    soundfile.write(tmp_path / "two.wav", stereo, RATE, subtype="FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "two.wav"), stereo.mean(1), atol=1e-6)
    time = np.arange(44100) / 44100
    soundfile.write(tmp_path / "high.wav", np.sin(2 * np.pi * 440 * time), 44100, subtype="FLOAT")
    converted = read_audio(tmp_path / "high.wav")
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    np.testing.assert_allclose(converted[500:-500], expected[500:-500], atol=5e-3)
    with pytest.raises(ValueError, match=r"high\.wav: has 44100 Hz, expected 16000: resample=True converts"):
        read_file(tmp_path / "high.wav")


HEADERS = {
    "WAV": {"format": "WAV"},
    "float": {"format": "WAV", "subtype": "FLOAT"},
    "ADPCM": {"format": "WAV", "subtype": "IMA_ADPCM"},
    **{form: {"format": form} for form in ("WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF")},
}


@pytest.mark.parametrize("form", HEADERS)
def test_memory_does_not_follow_what_a_header_says(tmp_path, form):
    """Each field in turn: rates, channels, bits, numbers of samples, sizes of chunks."""
    stream = io.BytesIO()
    soundfile.write(stream, sound(0.05), RATE, **HEADERS[form])
    good, path = stream.getvalue(), tmp_path / "x"
    for place in range(0, 80, 4):
        for value in (b"\0\0\0\1", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"):
            content = good[:place] + value + good[place + 4 :]
            path.write_bytes(content)
            tracemalloc.start()
            for read in (partial(read_file, content), partial(read_piece, path)):
                with contextlib.suppress(ValueError):
                    assert len(read(RATE, *([True] if read.func is read_file else []))) <= 16 * 800
            assert tracemalloc.get_traced_memory()[1] < 2**24
            tracemalloc.stop()


@pytest.mark.parametrize("rate", [1, 999, 65537, 20_000_003, 2**31 - 1])
def test_sampling_rates_that_no_recording_has(tmp_path, rate):
    content = bytearray(encoded(sound(0.5), form="WAV"))
    content[24:28] = rate.to_bytes(4, "little")
    (tmp_path / "x.wav").write_bytes(content)
    message = r"x\.wav: (sampling rates must be whole numbers of 1000 to 768000 Hz, got|65537 Hz cannot be converted)"
    lines = [{"audio": "x.wav", "text": "GO"}, *rows(tmp_path, 1)]
    _, skipped = load_speech(write_manifest(tmp_path / "all.jsonl", lines), max_bad=1)
    assert len(skipped) == 1
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "x.wav", resample=True)
    with pytest.raises(ValueError, match=message):
        read_piece(tmp_path / "x.wav", RATE, 1)


def test_a_small_file_of_endless_silence(monkeypatch):
    monkeypatch.setattr(audio, "FREE_SAMPLES", 1000)
    content = encoded(np.zeros(10 * RATE, np.float32))
    with pytest.raises(ValueError, match=r"bytes: unpacks to more than \d+ samples"):
        read_file(content)
    assert len(read_file(encoded(sound(1.0)))) == RATE


def test_needed_frames():
    assert needed_frames([3, 3, 4, 3]) == 5
    assert needed_frames([3, 3, 4, 3], ctc=False) == 4
    assert needed_frames([]) == 0


def test_transcripts_that_are_too_long():
    processor = ConformerProcessor(ConformerFeatureExtractor(), train_tokenizer(["ABC"], "char"))
    # 0.4 s are 38 frames and 7 outputs; a character model puts a space before the word.
    samples = round(0.4 * RATE)
    assert subsampled_frames(processor.feature_extractor.num_frames(samples)) == 7

    def check(text, seconds=0.4, **settings):
        skipped = Skipped(1)
        kept = check_lengths([Utterance("one", text, Path("x"), seconds)], processor, skipped, **settings)
        assert len(kept) + len(skipped) == 1
        return not skipped

    assert check("ABCABC")
    assert not check("ABCABCA")
    assert not check("ABBCAB")
    assert check("ABBCAB", ctc=False)
    assert check("ABCABC", fastest=1.0)
    assert not check("ABCABC", fastest=1.1)
    assert not check("A", seconds=0.1)
    assert check("A" * 300, outputs=lambda frames: 1000)
    with pytest.raises(ValueError, match=r"one \(x\): 0.40 s give 7 frames, too few for 8 tokens that need 8"):
        check_lengths([Utterance("one", "ABCABCA", Path("x"), 0.4)], processor, Skipped())
