"""Whole chapters in one pass: recordings, the rules for skipping and refusing, failures, memory against L x L.

No speed is asserted.
"""

import os

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import SPLITS, TEXTS, save_model
from transformers.models.lasr import modeling_lasr

from favor.eval import long_form
from favor.eval.common.isolated import Failure, isolated, unavailable
from favor.eval.common.launch import Backend
from favor.eval.speech import long_form_cell as cell
from favor.models.conformer import ConformerForCTC
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
    rows = [("b2", 3, "7", "2"), ("a1", 5, "9", "1"), ("b1", 2, "7", "2"), ("b0", 1, "7", "1")]
    utterances = [Utterance(name, "A", b"", seconds, speaker, chapter) for name, seconds, speaker, chapter in rows]
    assert [utterance.id for utterance in long_form.longest_speaker(utterances)] == ["b0", "b1", "b2"]


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
    words = ["--preset", "tiny", "--minutes", "3", "1", "0.2", "--max_exact_minutes", "1", "--num_features", "16"]
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


def test_a_transducer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a ConformerForCTC that is not causal"):
        long_form.check_model(cell.Setup(model_name_or_path=str(save_model(tmp_path, "transducer"))))


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
    content, _ = ran(long_form, "--preset", "tiny", "--num_features", 16, "--minutes", 0.6)
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
