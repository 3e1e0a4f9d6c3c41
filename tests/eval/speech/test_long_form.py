"""Whole chapters in one pass, and streams: recordings, skips, failures, memory and state. No speed is asserted."""

import os

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import SPLITS, TEXTS, save_model
from transformers.models.lasr import modeling_lasr

from favor.eval import long_form, streaming
from favor.eval.common.isolated import Failure, isolated, unavailable
from favor.eval.common.launch import Backend
from favor.eval.speech import long_form_cell as cell
from favor.models.conformer import ConformerForCTC, ConformerStream
from favor.models.speech import ConformerProcessor, ctc_greedy
from favor.train.speech.data import Utterance
from favor.train.speech.sources import load_speech

TINY = cell.Setup("tiny", num_features=16)
BOTH = [Backend("sdpa"), Backend("eager")]


def test_a_recording_is_its_utterances_from_the_beginning_again_if_need_be(corpus):
    utterances = load_speech(corpus, "train")[0]
    recording = cell.Recording.of(utterances, 4.5)
    names = ["train0", "train1", "train2", "train3", "train0"]
    assert [utterance.id for utterance in recording.utterances] == names
    assert recording.repeated
    assert recording.seconds == pytest.approx(sum(SPLITS["train"]) + SPLITS["train"][0])
    audio = np.concatenate([soundfile.read(corpus / f"{name}.wav", dtype="float32")[0] for name in names])
    np.testing.assert_array_equal(recording.samples(), audio)
    assert recording.text == " ".join(TEXTS[(number + 5) % len(TEXTS)] for number in (0, 1, 2, 3, 0))
    assert not cell.Recording.of(utterances, 4.1).repeated
    with pytest.raises(ValueError, match="must have lengths"):
        cell.Recording.of([Utterance("a", "A", b"")], 1.0)


def test_the_speaker_who_speaks_longest_in_order_of_chapters():
    rows = [("b2", 3, "7", "1"), ("a1", 5, "9", "1"), ("b1", 2, "7", "2"), ("b0", 1, "7", "2")]
    utterances = [Utterance(name, "A", b"", seconds, speaker, chapter) for name, seconds, speaker, chapter in rows]
    assert [utterance.id for utterance in long_form.longest_speaker(utterances)] == ["b2", "b0", "b1"]


def test_logits_are_checked(monkeypatch):
    recording = cell.Recording(2.0)
    found = cell.check(TINY, [Backend("favor#"), *BOTH], recording)
    assert long_form.problem(found) is None
    assert found["finite"] == {"favor#": True, "sdpa": True, "eager": True}
    assert 0 <= found["difference"] < 1e-5
    inputs = TINY.extractor()(recording.samples(), sampling_rate=16000)
    with torch.no_grad():
        exact, estimate = (TINY.build(Backend(name))(**inputs).logits for name in ("sdpa", "favor#"))
    assert found["distance"]["favor#"] == pytest.approx(((estimate - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert 1e-3 < found["distance"]["favor#"] < 1
    right = modeling_lasr.eager_attention_forward
    monkeypatch.setattr(modeling_lasr, "eager_attention_forward", lambda *i, **o: (1.05 * right(*i, **o)[0], None))
    assert "sdpa and eager differ by" in long_form.problem(cell.check(TINY, BOTH, cell.Recording(1.0)))


def answering(monkeypatch, answers):
    """Lets processes answer as told; gives the list of the tasks that they are asked for."""
    asked = []

    def isolated(limit, threads, task, setup, *more):
        asked.append(task.__name__)
        return answers(task.__name__, more)

    monkeypatch.setattr(long_form, "isolated", isolated)
    return asked


def good(task, more):
    """Eager takes memory like L^2 and the others like L; all take one second a minute."""
    if task == "check":
        labels = [backend.label for backend in more[0]]
        return {"finite": dict.fromkeys(labels, True), "difference": 1e-6, "distance": dict.fromkeys(labels, 0.1)}
    backend, recording = more[0], more[1]
    if task == "measure_time":
        clocks = {"seconds": recording.seconds / 60, "cpu_seconds": recording.seconds / 70}
        return {"frames": 25 * recording.seconds, "features": clocks, "pass": clocks}
    size = int(recording.seconds**2 if backend.name == "eager" else 8 * recording.seconds)
    return {"features": 10, "pass": size, "total": size + 100, "resident": size + 1000}


WRONG = [{"finite": {"sdpa": finite}, "difference": 2e-3, "distance": {"sdpa": 0.0}} for finite in (True, False)]


@pytest.mark.parametrize("answer", [Failure("killed"), *WRONG])
def test_no_times_without_the_check(monkeypatch, tmp_path, capsys, answer):
    asked = answering(monkeypatch, lambda task, more: answer)
    assert long_form.main(["--preset", "tiny", "--output_dir", str(tmp_path), "--minutes", "0.02"]) == 1
    assert asked == ["check"]
    assert capsys.readouterr().out.rstrip().endswith("no times are given")
    assert not list(tmp_path.iterdir())


def test_a_cell_without_memory_is_reported_and_the_others_go_on(monkeypatch, ran):
    def answers(task, more):
        if task == "measure_memory" and more[0].name == "sdpa" and more[1].seconds > 20:
            return Failure("out of memory")
        return good(task, more)

    asked = answering(monkeypatch, answers)
    words = [*SMALL, "--minutes", "3", "1", "0.2", "--max_exact_minutes", "1"]
    content, text = ran(long_form, *words, code=1)  # as slow as sdpa here
    found = {(c["minutes"], c["backend"]): (c["status"], c.get("reason")) for c in content["cells"]}
    assert found.pop((1.0, "sdpa")) == ("failed", "out of memory")
    for exact in ("sdpa", "eager"):
        assert found.pop((3.0, exact)) == ("skipped", "its time is quadratic, the limit is 1 minutes")
    assert set(found.values()) == {("ok", None)}
    assert len(found) == 6
    assert asked.count("measure_time") == 7
    assert "- sdpa at 1 minutes failed: out of memory" in text
    assert "| 1 | 1 (0.857) | failed | 1 (0.857) |" in text
    assert "--output_dir" not in content["command"]
    assert [check["holds"] for check in content["checks"]] == [True, True, False]


def made_up(label, minutes, size, seconds, status="ok"):
    sizes = {"features": 1, "pass": size, "total": size + 1, "resident": size + 2}
    clocks = {"seconds": seconds, "cpu_seconds": seconds}
    measured = {"bytes": sizes, "pass": clocks} if status == "ok" else {"reason": "no memory"}
    return {"backend": label, "minutes": minutes, "status": status, **measured}


def test_what_is_claimed():
    cells = [made_up("favor#", 10, 25e6, 4), made_up("sdpa", 10, 20e6, 5), made_up("eager", 10, 100e6, 6)]
    cells += [made_up("favor#", 60, 2e9, 20), made_up("sdpa", 60, 0, 0, "skipped")]
    found = long_form.checks(cells, 16.0)
    assert all(c.holds and part in c.statement for part, c in zip(("60 min", "10 min", "10 min"), found, strict=True))
    cells[0] = made_up("favor#", 10, 26e6, 5)
    assert [check.holds for check in long_form.checks(cells, 16.0)] == [True, False, False]
    cells[3] = made_up("favor#", 60, 2e9, 20, "failed")
    assert not long_form.checks(cells, 16.0)[0].holds
    assert long_form.checks([made_up("sdpa", 1, 1, 1)], 16.0) == []


def by_itself(folder, audio):
    model, processor = ConformerForCTC.from_pretrained(folder).eval(), ConformerProcessor.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**processor(audio, sampling_rate=16000)).logits
    return processor.tokenizer.decode(ctc_greedy(logits, [logits.shape[1]])[0], group_tokens=False)


def test_word_errors_of_the_whole_and_of_its_parts(corpus, tmp_path, monkeypatch):
    """The recognised texts, by the model itself; the counts, by a text that is right but for one word."""
    setup = cell.Setup(model_name_or_path=str(save_model(tmp_path)), num_features=16)
    utterances = load_speech(corpus, "dev")[0]
    recording = cell.Recording.of(utterances, 2.5)
    found = cell.measure_time(setup, Backend("sdpa"), recording, 1)
    assert found["text"] == by_itself(tmp_path, recording.samples())
    single = cell.transcripts(setup, Backend("sdpa"), utterances)
    assert single == [by_itself(tmp_path, cell.read_audio(utterance)) for utterance in utterances]
    assert len(set(single)) == 3
    heard = [utterance.text for utterance in utterances]
    heard[0] = "WRONG"
    monkeypatch.setattr(long_form, "isolated", lambda limit, threads, task, *more: heard)
    words = sum(len(utterance.text.split()) for utterance in utterances)
    wrong = len(utterances[0].text.split())
    twice = cell.Recording.of(utterances, 4.5)
    cells = [{"backend": "sdpa", "minutes": 1, "status": "ok", "text": recording.text + " AND MORE"}]
    cells += [{"backend": "sdpa", "minutes": 2, "status": "ok", "text": twice.text}]
    long_form.add_word_errors(cells, setup, [Backend("sdpa")], {1: recording, 2: twice})
    expected = [2 / words, wrong / words, 0.0, 2 * wrong / len(twice.text.split())]
    assert [each[name] for each in cells for name in ("wer", "utterance_wer")] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason="needs Linux")
def test_processes_end_as_they_should():
    assert isolated(1e9, 1, pow, 3, 2) == 9
    assert isolated(2e8, 1, torch.ones, 10**9) == Failure("out of memory: no 4000 MB were left")
    assert isolated(None, 1, int, "x").reason.startswith("ValueError: invalid literal")
    assert isolated(None, 1, os._exit, 3).reason == "the process ended with code 3 and no answer"
    # The limit is the process's own, and what it imports is not counted.
    assert not isinstance(isolated(2e8, 1, cell.measure_memory, TINY, BOTH[0], cell.Recording(1.0)), Failure)
    poor = isolated(1e6, 1, cell.measure_memory, TINY, BOTH[0], cell.Recording(1.0))
    assert poor.reason.startswith("out of memory")


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason="needs Linux")
def test_a_whole_run(monkeypatch, ran):
    """Peak memory of eager attention is two to three matrices of 4 x L x L numbers, that of sdpa less than one."""
    monkeypatch.setattr(long_form, "REPEATS", 1)
    content, _ = ran(long_form, *SMALL, "--minutes", 0.6)
    last = {c["backend"]: c for c in content["cells"]}
    assert list(last) == ["favor#", "sdpa", "eager"]
    for each in last.values():
        assert each["status"] == "ok"
        assert min(each["pass"]["seconds"], each["pass"]["cpu_seconds"]) > 0
        assert each["bytes"]["total"] >= each["bytes"]["pass"]
        assert each["bytes"]["resident"] > each["bytes"]["total"] + 1e8
    matrix = 4 * 4 * last["eager"]["frames"] ** 2
    assert matrix == 4 * 4 * 897**2
    assert 2 < last["eager"]["bytes"]["pass"] / matrix < 3.2
    assert last["sdpa"]["bytes"]["pass"] < matrix
    samples, features = 0.6 * 60 * 16000 * 4, 3598 * 80 * 4
    assert last["sdpa"]["bytes"]["features"] > 2 * features - 1e5  # float64 for the statistics
    assert last["sdpa"]["bytes"]["total"] - last["sdpa"]["bytes"]["pass"] > samples + features - 1e6


SETUP = cell.Setup("tiny", num_features=16, causal=True)
SMALL = ["--preset", "tiny", "--num_features", "16"]


@pytest.fixture(autouse=True)
def quick(sized):
    sized(streaming, REPEATS=2, CHECK_SECONDS=1.3)


def test_a_stream_that_is_wrong_is_found(monkeypatch, tmp_path, capsys):
    extractor, audio = streaming.make_extractor(SETUP), cell.noise(1.5)
    model = streaming.build("favor+", extractor, SETUP)
    assert 0 <= streaming.difference(model, extractor, audio, 1280) < 1e-4
    right = ConformerStream.feed
    monkeypatch.setattr(ConformerStream, "feed", lambda self, piece: right(self, piece) + 0.01)
    assert streaming.difference(model, extractor, audio, 1280) == pytest.approx(0.01, rel=1e-2)
    monkeypatch.setattr(streaming, "measure", lambda *_: pytest.fail("measured"))
    assert streaming.main([*SMALL, "--output_dir", str(tmp_path), "--backends", "favor+"]) == 1
    assert "logits differ from those of a whole pass: favor+ by 0.01: no times are given" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    for factor, share in ((torch.nan, 1), (1, 2)):  # no numbers; half a piece
        wrong = lambda self, piece, a=factor, b=share: a * right(self, piece[: len(piece) // b])  # noqa: E731
        monkeypatch.setattr(ConformerStream, "feed", wrong)
        assert streaming.difference(model, extractor, audio, 1280) == float("inf")


@pytest.mark.parametrize("backend", ["favor+", "sdpa"])
def test_a_branch_goes_on_by_itself(backend):
    extractor, audio = streaming.make_extractor(SETUP), cell.noise(3.0)
    model = streaming.build(backend, extractor, SETUP)
    stream = model.stream(extractor)
    streaming.feed(stream, audio[:16000], 1280)
    branch = streaming.branch(stream)
    assert branch.model is model
    assert branch.encoder.layers[0] is model.encoder.layers[0]
    found = streaming.feed(branch, audio[16000:], 1600)
    assert branch.frames > stream.frames
    torch.testing.assert_close(found, streaming.feed(stream, audio[16000:], 1600), rtol=0, atol=0)


def test_a_whole_run_of_streams(ran):
    content, _ = ran(streaming, *SMALL, "--pieces_ms", 80, 320, "--minutes", 0.05, 0)
    assert max(content["differences"].values()) < 1e-4
    rows = {(row["piece_ms"], row["minutes"], row["backend"]): row for row in content["rows"]}
    assert len(rows) == 2 * 2 * 3
    for row in rows.values():
        assert 0 < row["median"] <= row["upper"]
        assert min(row["cpu_factor"], row["factor"]) > 0
    for piece in (80, 320):
        early, late = (rows[piece, minutes, "sdpa"] for minutes in (0, 0.05))
        assert (early["seconds"], late["seconds"]) == (pytest.approx(1.28), pytest.approx(3.0))
        # Keys and values of 4 layers, width 128, for every frame that is new.
        frames = round((late["seconds"] - early["seconds"]) / 0.04)
        assert late["state_bytes"] - early["state_bytes"] == pytest.approx(4 * 2 * 128 * 4 * frames, rel=0.03)
        for name in ("favor+", "favor#"):
            sizes = [rows[piece, minutes, name]["state_bytes"] for minutes in (0, 0.05)]
            # 16 features a head with values of width 32 and a weight each; 14 frames for the convolution.
            state = 4 * (4 * 16 * (32 + 1) + 14 * 128) * 4
            assert sizes == pytest.approx([state, state], rel=0.15)
    assert content["latency_seconds"] == pytest.approx(0.145)
    assert [check["statement"].split(":")[0] for check in content["checks"]] == 3 * ["favor+"] + 3 * ["favor#"]


def row(backend, minutes, state, cpu, factor):
    numbers = {"state_bytes": state, "cpu": cpu, "cpu_factor": factor}
    return {"backend": backend, "piece_ms": 40, "minutes": minutes, **numbers}


def test_what_is_claimed_of_streams():
    sdpa = [row("sdpa", 0, 10, 1, 0.1), row("sdpa", 5, 1000, 9, 2.0)]
    good = [row("favor+", 0, 1000, 10, 0.4), row("favor+", 5, 1010, 15, 0.9)]
    assert [check.holds for check in streaming.checks([*good, *sdpa])] == [True, True, True]
    bad = [row("favor+", 0, 1000, 10, 0.4), row("favor+", 5, 1011, 15.1, 1.0)]
    assert [check.holds for check in streaming.checks([*bad, *sdpa])] == [False, False, False]


def test_features_of_noise_are_normalised_and_models_of_another_kind_are_refused(tmp_path):
    features = streaming.make_extractor(SETUP)(cell.noise(5.0, 7), sampling_rate=16000).input_features[0]
    np.testing.assert_allclose(features.mean(0), 0, atol=0.25)
    np.testing.assert_allclose(features.std(0), 1, atol=0.25)
    with pytest.raises(ValueError, match="a model for streaming"):
        streaming.make_extractor(cell.Setup(model_name_or_path=str(save_model(tmp_path, causal=True))))
    with pytest.raises(ValueError, match="must be a ConformerForCTC that is not causal"):
        long_form.check_model(cell.Setup(model_name_or_path=str(save_model(tmp_path / "other", "transducer"))))
