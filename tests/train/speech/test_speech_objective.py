"""Speech training in chunks and with a Whisper as teacher: what is drawn and minimised, resuming, saving, refusals."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speech import RATE
from stopping import whole_and_resumed
from transformers import WhisperFeatureExtractor

from favor.eval import asr as evaluation
from favor.models.conformer import (
    Chunks,
    ConformerConfig,
    ConformerFeatureExtractor,
    ConformerForCTC,
    ConformerForTransducer,
)
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train.speech import objective
from favor.train.speech.batches import SpeechDataset, collate
from favor.train.speech.data import Utterance
from favor.train.speech.objective import TaughtModel, WhisperTeacher, draw_chunks, frame_places, unexplained

SETTINGS = {"preset": "tiny", "tokenizer_type": "char", "attn_implementation": "sdpa"}
SETTINGS |= {"per_device_train_batch_seconds": 8, "max_train_steps": 4, "learning_rate": 2e-3}


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_chunks_are_drawn_from_their_ranges():
    torch.manual_seed(0)
    drawn = [draw_chunks(0.5, (4, 6)) for _ in range(400)]
    assert 150 < drawn.count(None) < 250
    assert {one for one in drawn if one is not None} == {Chunks(size) for size in (4, 5, 6)}
    assert draw_chunks(1.0, (4, 4)) == Chunks(4)


def test_the_mean_explains_nothing_and_scales_do_not_matter():
    goal = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100.0, 0.01]) + 5
    torch.testing.assert_close(unexplained(goal.mean(0).expand(50, 3), goal), torch.tensor(1.0))
    assert unexplained(goal, goal) == 0
    half = goal.mean(0) + 0.5 * (goal - goal.mean(0))
    torch.testing.assert_close(unexplained(half, goal), torch.tensor(0.25))


def test_the_states_of_the_teacher_are_those_of_its_encoder_at_the_frames_of_the_student(whisper):
    teacher = WhisperTeacher(str(whisper), torch.device("cpu"))
    sounds = [torch.randn(length, generator=torch.Generator().manual_seed(length)) * 0.1 for length in (16000, 9000)]
    heard = teacher.extractor(sounds, sampling_rate=RATE)
    places = torch.tensor([0.0, 320.0, 400.0, 12800.0, 10**6])
    found = teacher.states(heard["input_features"], heard["attention_mask"], places)
    for row, sound in enumerate(sounds):
        with torch.no_grad():
            own = teacher.encoder(teacher.extractor(sound, sampling_rate=RATE)["input_features"]).last_hidden_state[0]
        frames = [own[0], own[1], 0.75 * own[1] + 0.25 * own[2], own[min(40, len(own) - 1)], own[-1]]
        torch.testing.assert_close(found[row], torch.stack(frames), rtol=1e-4, atol=1e-5)
    config = ConformerConfig.preset("tiny")
    # Frame t hears features 4 t to 4 t + 12, and a feature hears 400 samples from 160 times its number on.
    assert frame_places(config, 3, 400).tolist() == [(640 * t + 640 * t + 12 * 160 + 400) / 2 for t in range(3)]


@pytest.mark.parametrize("kind", [ConformerForCTC, ConformerForTransducer])
def test_the_teacher_moves_the_encoder_and_padding_does_not(kind):
    torch.manual_seed(0)
    config = ConformerConfig.preset("tiny", vocab_size=8, dropout=0.0, prediction_dropout=0.0, num_hidden_layers=1)
    model = TaughtModel(kind(config), width=6, weight=2.0).eval()
    mask = torch.arange(60)[None] < torch.tensor([60, 40])[:, None]
    features, goal, labels = torch.randn(2, 60, 80), torch.randn(2, 12, 6), torch.tensor([[3, 4], [5, -100]])

    def loss(goal, features=features, weight=2.0):
        model.weight = weight
        return model(goal, input_features=features, attention_mask=mask, labels=labels)

    own = model.student(input_features=features, attention_mask=mask, labels=labels)
    taught = loss(goal)
    hidden = model.student.encoder(features, mask).last_hidden_state
    real = torch.cat([hidden[0], hidden[1, :7]])
    expected = unexplained(model.projection(real), torch.cat([goal[0], goal[1, :7]]))
    torch.testing.assert_close(taught - own.loss, 2 * expected)
    first = model.student.encoder.subsampler.dense_0.weight
    slopes = [torch.autograd.grad(loss(goal, weight=weight), first)[0] for weight in (0.0, 2.0)]
    assert not torch.allclose(slopes[0], slopes[1], atol=1e-6)
    changed = torch.cat([goal[:, :7], goal[:, 7:] + 9 * torch.tensor([0.0, 1.0])[:, None, None]], dim=1)
    noisy = torch.where(mask[..., None], features, 50.0)
    torch.testing.assert_close(loss(changed, noisy), taught, rtol=1e-4, atol=1e-5)


def test_the_teacher_hears_the_speed_but_no_noise(corpus, whisper):
    sound = next((corpus / "LibriSpeech" / "train").rglob("*.flac"))
    said = [Utterance("one", "BAD", sound, 1.0)]
    processor = ConformerProcessor(ConformerFeatureExtractor(), train_tokenizer(["BAD"], "char"))
    teacher = WhisperTeacher(str(whisper), torch.device("cpu")).extractor
    plain, noisy = (
        SpeechDataset(said, processor, speeds=(0.9,), teacher=teacher, **noise)
        for noise in ({}, {"acoustics": lambda sound, *_: 5 * sound, "dither": 0.1})
    )
    one, other = plain[0, 0], noisy[0, 0]
    assert not torch.allclose(one["input_features"], other["input_features"])
    assert torch.equal(one["teacher_features"], other["teacher_features"])
    slower = SpeechDataset(said, processor, teacher=teacher)[0, 0]
    assert len(one["teacher_features"]) == pytest.approx(len(slower["teacher_features"]) / 0.9, abs=2)
    batch = collate([one, slower])
    assert batch["teacher_mask"].sum(1).tolist() == [len(one["teacher_features"]), len(slower["teacher_features"])]
    assert set(batch) == {"input_features", "attention_mask", "labels", "teacher_features", "teacher_mask"}


def test_resume_repeats_the_uninterrupted_run(train, whisper, tmp_path):
    settings = {"max_train_steps": 5, "checkpointing_steps": 2, "dropout": 0.2, "dynamic_chunk": 0.5}
    settings |= {"whisper_teacher": whisper, "architecture": "transducer"}
    whole, resumed = whole_and_resumed(train, tmp_path, 4, **settings)
    assert resumed["history"] == whole["history"]
    assert not any(name.startswith(("projection", "student")) for name in weights(tmp_path / "whole"))
    plain = train("plain", **{**settings, "whisper_teacher": None})
    assert plain["train_loss"] != whole["train_loss"]
    assert ConformerForTransducer.from_pretrained(tmp_path / "whole").config.vocab_size > 0


def test_an_encoder_that_is_not_trained_keeps_the_statistics_of_its_batch_normalisation(train, tmp_path):
    """Which no gradient changes, but a pass in training mode does; a Whisper, the other test's encoder, has none."""
    train("first", max_train_steps=1)
    rest = {"model_name_or_path": tmp_path / "first", "preset": None, "tokenizer_type": None}
    train("second", encoder_learning_rate=0, max_train_steps=2, ema_decay=0, **rest)
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert changed == {"ctc_head.weight", "ctc_head.bias"}


def test_a_model_of_chunks_is_evaluated_in_chunks_and_streams(train, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(objective, "CHUNK_SECONDS", (0.08, 0.4))
    trained = train(dynamic_chunk=0.7, max_train_steps=12, ema_decay=0.5)
    words = ["--model_name_or_path", str(tmp_path / "run"), "--data_dir", str(corpus), "--eval_splits", "dev"]
    rates = []
    for more in ([], ["--chunk_seconds", "0.16"], ["--chunk_seconds", "0.16", "--left_chunks", "1"]):
        assert evaluation.main([*words, *more, "--output_dir", str(tmp_path / "errors"), "--device", "cpu"]) == 0
        found = json.loads((tmp_path / "errors" / "asr.json").read_text())
        rates.append((found["chunks"], found["splits"]["dev"]["searches"]["greedy"]["cer"]))
    assert [chunks for chunks, _ in rates] == [None, "0.16 s, all before each", "0.16 s, 1 before each"]
    assert rates[0][1] == pytest.approx(trained["metrics"]["dev_cer"])
    model = ConformerForCTC.from_pretrained(tmp_path / "run").eval()
    stream = model.transcribe_stream(chunks=Chunks(4))
    assert stream.feed(np.zeros(20000, np.float32)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_chunk": 1.5}, "dynamic_chunk must be at least 0 and at most 1"),
        ({"dynamic_chunk": 0.5, "causal": ""}, "a causal model streams without them"),
        (
            {"dynamic_chunk": 0.5, "attn_implementation": "favor#"},
            r"call favor\.calibrate first, or use favor\+ or sdpa",
        ),
        ({"dynamic_chunk": 0.5, "attn_implementation": "landmark"}, r"use favor\+ with window=0, or sdpa"),
    ],
)
def test_what_cannot_be_is_refused(train, options, message):
    with pytest.raises(ValueError, match=message):
        train(**options)


def test_only_a_whisper_teaches_and_only_a_conformer_learns(train, whisper, tmp_path):
    train(max_train_steps=1)
    again = {"model_name_or_path": tmp_path / "run", "preset": None, "tokenizer_type": None}
    with pytest.raises(ValueError, match="chunks cannot wait for the whole utterance"):
        train("other", dynamic_chunk=0.5, **again)
    with pytest.raises(ValueError, match=r"teacher must be a Whisper, or CTC on its encoder; .* holds conformer"):
        train("other", whisper_teacher=tmp_path / "run")
    other = {"model_name_or_path": whisper, "architecture": "ctc", "encoder_learning_rate": 1e-4}
    other |= {"preset": None, "per_device_train_batch_seconds": 24}
    with pytest.raises(ValueError, match="whisper_teacher is for Conformers, got WhisperForCTC"):
        train("other", whisper_teacher=whisper, **other)
    with pytest.raises(ValueError, match="dynamic_chunk is for Conformers, got WhisperForCTC: leave it out"):
        train("other", dynamic_chunk=0.5, **other)
    WhisperFeatureExtractor(feature_size=40, chunk_length=6).save_pretrained(tmp_path / "wide")
    for path in whisper.iterdir():
        if "processor" not in path.name:
            (tmp_path / "wide" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"input_features must be \[batch, time, 80\], got .*40"):
        train("other", whisper_teacher=tmp_path / "wide")


def test_ctc_on_a_whisper_teaches_too(train, whisper, tmp_path):
    settings = {"model_name_or_path": whisper, "architecture": "ctc", "encoder_learning_rate": 1e-4, "preset": None}
    train("ctc", **settings, per_device_train_batch_seconds=24, max_train_steps=1)
    assert train("student", whisper_teacher=tmp_path / "ctc")["train_loss"] > 0
