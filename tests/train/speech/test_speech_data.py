"""Readers of speech and what they refuse; error rates against counts by hand."""

import contextlib
import dataclasses
import io
import math
import tracemalloc
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile
from speech_corpus import RATE, assert_told, librispeech, rows, sound, transcript, write_manifest, write_sound

from favor.models.conformer.configuration_conformer import subsampled_frames
from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, audio, read_file, resample, train_tokenizer
from favor.models.speech.audio import read_piece
from favor.train.speech import sources as speech_sources
from favor.train.speech.data import Skipped, Utterance, check_lengths, read_audio
from favor.train.speech.manifests import read_manifest
from favor.train.speech.prepare import prepare
from favor.train.speech.sources import from_dataset, load_speech, read_audio_folder, read_hub, read_librispeech
from favor.train.speech.word_errors import ErrorCounts, character_errors, word_errors


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
    assert [(one.speaker, one.chapter) for one in found] == [("12", "112")] * 2 + [("7", "107")] * 2
    said = [(transcript(1), 0.8), (transcript(3), 0.7), (transcript(0), 1.0), (transcript(2), 1.2)]
    assert [(one.text, one.seconds) for one in found] == said
    samples = read_audio(found[0])
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, sound(0.8, 1), atol=0.05 if ending == ".mp3" else 1e-4)


def test_splits_are_joined_and_what_does_not_fit_is_named(corpus):
    librispeech(corpus, "test", lengths=(0.5, 0.6), speakers=(8, 9))
    found, _ = load_speech(corpus, "dev+test", prepared=corpus / "ready")
    assert [one.seconds for one in found] == [0.8, 0.7, 1.0, 1.2, 0.5, 0.6]
    assert (corpus / "ready" / "dev+test" / "checked.jsonl").exists()
    chapter = corpus / "LibriSpeech" / "dev" / "7" / "107"
    for name in ("7-107-0008.flac", "7-107-0000.wav", "7-107-0006.flac"):
        write_sound(chapter / name, 0.5)
    with (chapter / "7-107.trans.txt").open("a") as stream:
        stream.write("7-107-0005 NO AUDIO\n7-107-0006\n")
    (corpus / "LibriSpeech" / "dev" / "12" / "112" / "12-112.trans.txt").unlink()
    skipped = Skipped(10)
    assert [one.id for one in read_librispeech(corpus, "dev", skipped)] == ["7-107-0000", "7-107-0002"]
    expected = {"7-107-0000": "has the id of another file", "7-107-0005": "no .flac", "7-107-0006": "empty transcript"}
    told = {name.split()[0]: reason for name, reason in skipped.reasons.items()}
    assert_told(told, expected | dict.fromkeys(("7-107-0008", "12-112-0001", "12-112-0003"), "no transcript"))
    with pytest.raises(ValueError, match=r"12-112-0001 \(.*: has no transcript"):
        read_librispeech(corpus, "dev")
    with pytest.raises(ValueError, match=r"split must be a folder of .*, got 'train'; there are: dev"):
        read_librispeech(corpus, "train")
    (corpus / "LibriSpeech" / "empty" / "1" / "2").mkdir(parents=True)
    with pytest.raises(ValueError, match="found no <speaker>/<chapter>"):
        read_librispeech(corpus, "empty")


def test_transcripts_with_bad_bytes_are_counted(corpus):
    """A byte order mark and a line end of another system do not spoil a name, and one bad byte only its own line."""
    chapter = corpus / "LibriSpeech" / "dev" / "7" / "107"
    content = "7-107-0000 GO\x85 HER\r\n7-107-0002 D".encode("utf-8-sig") + b"\xff\r\n"
    (chapter / "7-107.trans.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"'7-107-0002' .*not UTF-8"):
        read_librispeech(corpus, "dev")
    found = read_librispeech(corpus, "dev", Skipped(1))
    assert [one.text for one in found if one.speaker == "7"] == ["GO HER"]
    (chapter / "\udcff.wav").touch()
    with pytest.raises(ValueError, match="names of files must be UTF-8"):
        read_audio_folder(corpus)


def test_manifest_in_json_and_csv(tmp_path):
    lines = rows(tmp_path)
    lines[1] |= {"id": "one", "seconds": 0.6, "speaker": 4, "chapter": "c"}
    file = write_manifest(tmp_path / "train.jsonl", lines)
    table = [f'{one["audio"]},"{one["text"]}",{"one,0.6,4,c" if "id" in one else ",,,"}\n' for one in lines]
    (tmp_path / "train.csv").write_text("audio,text,id,seconds,speaker,chapter\n" + "".join(table))
    found = read_manifest(file)
    assert found == read_manifest(tmp_path / "train.csv")
    names = ("audio/0.wav", "one", "audio/2.wav")
    assert [(one.id, one.text) for one in found] == [(name, transcript(n)) for n, name in enumerate(names)]
    assert (found[1].seconds, found[1].speaker, found[1].chapter) == (0.6, "4", "c")
    assert found[2].speaker is None
    assert [one.seconds for one in load_speech(file)[0]] == [0.5, 0.6, 0.7]


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
    whole, said = read_audio(tmp_path / "clips" / "long.mp3"), [(one.id, one.text) for one in found]
    if name == "nemo.jsonl":
        assert said == [("clips/long.mp3@0.25", "GO HER"), ("clips/long.mp3@1.0", "DO")]
        assert [one.seconds for one in found] == [0.5, 0.4]
        np.testing.assert_allclose(read_audio(found[0]), whole[4000:12000], atol=1e-6)
        np.testing.assert_allclose(read_audio(found[1]), whole[16000:22400], atol=1e-6)
        moved = OTHERS[name][1].replace('"offset": 1', '"offset": 1.8')
        (tmp_path / name).write_text("\n".join([OTHERS[name][0], moved, moved.replace("1.8", "1e305")]))
        _, skipped = load_speech(tmp_path, "nemo", prepared=tmp_path / "ready", max_bad=2)
        assert "lasts 0.20 s, but the source says 0.40 s" in skipped.describe()
        assert "begins after 1e+305 s of 2.00 s" in skipped.describe()
    else:
        assert said == [("long.mp3", "GO HE SAID"), ("clips/two.wav", "DO IT")]
        assert [one.speaker for one in found] == ["a1b2", "a1b2"]
        np.testing.assert_array_equal(read_audio(found[0]), whole)


def test_manifest_in_a_folder(tmp_path):
    lines = rows(tmp_path)
    write_manifest(tmp_path / "train.jsonl", lines)
    assert len(read_manifest(tmp_path)) == 3
    (tmp_path / "train").mkdir()
    write_manifest(tmp_path / "test.jsonl", lines[:1])
    write_manifest(tmp_path / "dev" / "list.jsonl", [{"audio": str(tmp_path / "audio/0.wav"), "text": "A"}])
    assert [len(load_speech(tmp_path, split)[0]) for split in ("train", "test", "dev")] == [3, 1, 1]
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    for path, split, message in (
        ("", None, r"expected one .* found test.jsonl, train.jsonl"),
        ("", "other", r"expected other.jsonl, .* found test.jsonl, train.jsonl"),
        ("train.jsonl", "train", "split must be None for a manifest file"),
        ("x.jsonl.gz", None, r"x\.jsonl\.gz: is compressed"),
        ("nothing.jsonl", None, "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            read_manifest(tmp_path / path, split=split)


def test_manifest_names_bad_rows(tmp_path):
    (good,) = rows(tmp_path, 1)
    bad = [
        ({"text": "A"}, "audio must be given"),
        ({"audio": "x.wav"}, "text must be given"),
        ({"audio": "x.wav", "text": "42"}, "empty after normalisation"),
        ([1], "JSON object"),
        ({**good, "id": "other", "seconds": "long"}, "seconds must be a number of seconds, got 'long'"),
        ({**good, "seconds": 10**400}, "seconds must be a number of seconds, got 1000"),
        ({**good, "offset": -1}, "offset must be a number of seconds, got -1"),
        ({**good, "speaker": [[]]}, "speaker must be a text in UTF-8"),
        ({**good, "text": "GO\ud800"}, "text must be a text in UTF-8"),
        ({"audio": "a\0.wav", "text": "GO"}, "audio must be a text in UTF-8"),
        (b"not json", "not json"),
        (b"[" * 200000, "JSON object"),
        (b"[" * 400 + b"]" * 400, "JSON object"),
        (b'{"audio": "\xff.wav", "text": "GO"}', "audio must be a text in UTF-8"),
    ]
    file = write_manifest(tmp_path / "all.jsonl", [good, *(row for row, _ in bad if not isinstance(row, bytes))])
    file.write_bytes(file.read_bytes() + b"".join(row + b"\n" for row, _ in bad if isinstance(row, bytes)))
    skipped = Skipped(20)
    assert len(read_manifest(file, skipped)) == 1
    assert_told(skipped.reasons, {f"{file}:{line}": words for line, (_, words) in enumerate(bad, 2)})
    assert max(map(len, skipped.reasons.values())) < 200
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
    told = {2: "field larger", 3: "UTF-8", 4: "UTF-8", 5: "text must be given", 6: "more fields"}
    told |= {10: "unexpected end"} if ending == ".csv" else {}
    names = {f"{file}:{line}": words for line, words in told.items()} | {"a" * 5000: "cannot be decoded: "}
    assert_told({name.split(" (")[0]: reason for name, reason in skipped.reasons.items()}, names)


@pytest.fixture
def dataset(corpus):
    """As the hub has it: audio in the rows or in files."""
    files = sorted(corpus.rglob("*.flac"))
    audio = [{"path": str(files[0]), "bytes": None}]
    audio += [{"path": file.name, "bytes": file.read_bytes()} for file in files[1:]]
    columns = {"audio": audio, "text": [transcript(number) for number in (1, 3, 0, 2)]}
    columns |= {"id": [file.stem for file in files], "speaker_id": [12, 12, 7, 7], "chapter_id": [112, 112, 107, 107]}
    built = datasets.Dataset.from_dict(columns)
    features = datasets.Features({**built.features, "audio": datasets.Audio(sampling_rate=RATE, decode=False)})
    return built.cast(features)


def test_dataset_of_the_hub(dataset, corpus, tmp_path, monkeypatch):
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
    asked = []
    monkeypatch.setattr(speech_sources, "load_dataset", lambda *args, **given: asked.append((args, given)) or dataset)
    assert len(load_speech("openslr/librispeech_asr:clean", "validation+test", prepared=tmp_path)[0]) == 4
    assert asked == [(("openslr/librispeech_asr", "clean"), {"split": "validation+test"})]


def test_dataset_without_ids_texts_or_a_split(dataset):
    bare = from_dataset(dataset.select_columns(["audio", "text"]))
    assert [(one.id, one.speaker) for one in bare] == [(str(number), None) for number in range(4)]
    empty = dataset.map(lambda row, number: {"text": "" if number == 2 else row["text"]}, with_indices=True)
    with pytest.raises(ValueError, match=r"row 2 of .*: has an empty transcript"):
        from_dataset(empty)
    with pytest.raises(ValueError, match="must have the columns audio and text, got audio, id"):
        from_dataset(dataset.select_columns(["audio", "id"]))
    with pytest.raises(ValueError, match="split must be given"):
        read_hub("openslr/librispeech_asr")


def encoded(samples, form="FLAC", **options):
    stream = io.BytesIO()
    soundfile.write(stream, samples, RATE, format=form, **options)
    return stream.getvalue()


WHOLE = encoded(sound(1.0))
# A FLAC whose header promises more than there is: 36 bits of STREAMINFO, from byte 21 on, hold the number of samples.
UNFINISHED = WHOLE[:22] + (2 * RATE).to_bytes(4, "big") + WHOLE[26:]
BAD_FILES = {
    "empty": (b"", "the file is empty"),
    "header alone": (encoded(np.zeros(0, np.float32), form="WAV"), "holds no samples"),
    "text": (b"this is not audio at all" * 20, "cannot be decoded"),
    "cut": (WHOLE[:9000], "cannot be decoded|cut short"),
    "promises": (UNFINISHED, "cut short: 16000 of 32000|cannot be decoded"),
    "cut mp3": (encoded(sound(2.0), form="MP3")[:3000], "cut short"),
    "infinite": (encoded(np.full(9, np.inf, np.float32), form="WAV", subtype="FLOAT"), "samples that are not finite"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_bad_audio_is_named(tmp_path, content, message):
    path = tmp_path / "some.flac"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"some.flac: .*({message})"):
        read_audio(path)
    with pytest.raises(ValueError, match=f"bytes: .*({message})"):
        read_audio(content)


def test_one_missing_sample_is_noticed_and_a_small_file_of_endless_silence(monkeypatch):
    """Of a file that decodes without an error, as a cut MP3 does."""
    with monkeypatch.context() as patch:
        patch.setattr(audio, "_decode", lambda stream, *_: stream.read(RATE - 1, dtype="float32"))
        with pytest.raises(ValueError, match="cut short: 15999 of 16000 samples can be decoded"):
            read_audio(WHOLE)
    monkeypatch.setattr(audio, "FREE_SAMPLES", 1000)
    with pytest.raises(ValueError, match=r"bytes: unpacks to more than \d+ samples"):
        read_file(encoded(np.zeros(10 * RATE, np.float32)))
    assert len(read_file(WHOLE)) == RATE


def test_channels_and_rates(tmp_path):
    stereo = np.stack([sound(0.5, 1), sound(0.5, 2)], 1)
    soundfile.write(tmp_path / "two.wav", stereo, RATE, subtype="FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "two.wav"), stereo.mean(1), atol=1e-6)
    soundfile.write(tmp_path / "high.wav", sound(0.5, 1), 44100, subtype="FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "high.wav"), resample(sound(0.5, 1), 44100, RATE), atol=1e-6)
    with pytest.raises(ValueError, match=r"high\.wav: has 44100 Hz, expected 16000: resample=True converts"):
        read_file(tmp_path / "high.wav")


HEADERS = {form: {"form": form} for form in ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF")}
HEADERS |= {kind: {"form": "WAV", "subtype": kind} for kind in ("FLOAT", "IMA_ADPCM")}


@pytest.mark.parametrize("form", HEADERS)
def test_memory_does_not_follow_what_a_header_says(tmp_path, form):
    """Each field in turn: rates, channels, bits, numbers of samples, sizes of chunks."""
    good, path = encoded(sound(0.05), **HEADERS[form]), tmp_path / "x"
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
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / "x.wav", resample=True)
    with pytest.raises(ValueError, match=message):
        read_piece(tmp_path / "x.wav", RATE, 1)


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
    assert check("ABBCAB", ctc=False)
    assert check("A" * 300, outputs=lambda frames: 1000)
    assert not check("ABCABCA")
    assert not check("ABBCAB")  # a blank between the two letters
    assert not check("ABCABC", fastest=1.1)
    assert not check("A", seconds=0.1)
    with pytest.raises(ValueError, match=r"one \(x\): 0.40 s give 7 frames, too few for 8 tokens that need 8"):
        check_lengths([Utterance("one", "ABCABCA", Path("x"), 0.4)], processor, Skipped())


def test_counts_by_hand():
    for reference, hypothesis, words, characters in (
        ("the cat sat", "the sat", (2, 0, 1, 0), (7, 0, 4, 0)),
        ("a b c d", "a x c d e", (3, 1, 0, 1), (6, 1, 0, 2)),
        ("A b", "a b", (1, 1, 0, 0), (2, 1, 0, 0)),
        ("the cat", "", (0, 0, 2, 0), (0, 0, 7, 0)),
        ("", "a cat", (0, 0, 0, 2), (0, 0, 0, 5)),
        ("", "", (0, 0, 0, 0), (0, 0, 0, 0)),
        ("  the \t cat\n", "the\u00a0cat", (2, 0, 0, 0), (7, 0, 0, 0)),
        ("notable", "not able", (0, 1, 0, 1), (7, 0, 0, 1)),
        ("naïve 東京", "naive 東京", (1, 1, 0, 0), (7, 1, 0, 0)),
    ):
        assert word_errors([reference], [hypothesis]) == ErrorCounts(*words)
        assert character_errors([reference], [hypothesis]) == ErrorCounts(*characters)


def test_a_split_is_the_sum_of_its_utterances_and_not_the_mean_of_rates():
    references, hypotheses = ["a b c d", "a", ""], ["a b c d", "b", "c"]
    total = word_errors(references, hypotheses)
    assert total == ErrorCounts(hits=4, substitutions=1, deletions=0, insertions=1)
    assert (total.errors, total.reference_length, total.rate) == (2, 5, 0.4)
    parts = [word_errors([r], [h]) for r, h in zip(references, hypotheses, strict=True)]
    assert parts[0] + parts[1] + parts[2] == total


def test_rates_at_the_edges():
    assert word_errors([], []).rate == 0
    assert word_errors([""], [""]).rate == 0
    assert word_errors([""], ["a"]).rate == math.inf
    assert word_errors(["a"], ["b c d"]).rate == 3
    assert word_errors(["a b"], [""]).rate == 1
