"""The speech training program: it learns, resumes, averages, counts, refuses; chunks, a Whisper, one as teacher."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import soundfile
import tiny_speech
import torch
from launching import fork, options
from safetensors.torch import load_file
from speech_corpus import (
    AGAIN,
    CONFORMER,
    EXACT,
    FRAMES,
    HEAD,
    RATE,
    SPECIAL,
    WHISPER,
    assert_told,
    make_processor,
    members,
    write_corpus,
    write_shard,
)
from stopping import same_weights, stopped_after, whole_and_resumed
from transformers import AutoModelForCTC, AutoProcessor, WhisperFeatureExtractor

import favor
from favor.eval import asr as evaluation
from favor.eval.asr import recognise
from favor.models.conformer import Chunks, ConformerConfig, ConformerForCTC, ConformerForTransducer
from favor.models.whisper_ctc import WhisperForCTC
from favor.train import asr
from favor.train.speech import objective
from favor.train.speech.arguments import Arguments
from favor.train.speech.augment import SpecAugment
from favor.train.speech.batches import SpeechDataset, WhisperDataset, collate, collate_whisper, fitting, label_ids
from favor.train.speech.data import Skipped, Utterance, join, read_audio
from favor.train.speech.objective import TaughtModel, WhisperTeacher, draw_chunks, frame_places, unexplained
from favor.train.speech.sources import load_speech

PLAIN = {"speeds": "1", "spec_augment": "0 0 0 0"}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Three utterances of one word each."""
    return write_corpus(tmp_path_factory.mktemp("short"), {"train": 3, "dev": 1}, words=(1, 2))


@pytest.mark.slow
def test_a_transducer_learns(train, short):
    options = {**PLAIN, "data_dir": short, "architecture": "transducer", "eval_splits": "train"}
    first, last = (train(str(steps), max_train_steps=steps, learning_rate=5e-3, **options) for steps in (1, 20))
    assert last["train_loss"] < 0.6 * first["train_loss"]


@pytest.mark.slow
def test_three_utterances_are_learned_by_heart(train, short, tmp_path):
    options = {**PLAIN, "dropout": 0, "ema_decay": 0.9, "eval_splits": "train", "data_dir": short}
    results = train(max_train_steps=48, learning_rate=5e-3, **options)
    assert results["metrics"]["train_wer"] < 5
    assert results["utterances"] == {"train": 3}
    # What was saved says the same to a user of transformers.
    model, processor = (kind.from_pretrained(tmp_path / "run") for kind in (AutoModelForCTC, AutoProcessor))
    chapter = short / "LibriSpeech" / "train" / "1" / "7"
    name, text = (chapter / "1-7.trans.txt").read_text().splitlines()[0].split(" ", 1)
    audio, rate = soundfile.read(chapter / f"{name}.flac", dtype="float32")
    logits = model.eval()(**processor(audio, sampling_rate=rate)).logits
    assert processor.batch_decode(logits.argmax(-1)) == [text]


def test_a_causal_model_gets_fixed_features_also_of_audio_whose_band_ends_early(train, tmp_path):
    """Some bins are constant there, and "none" divides by their deviation."""
    root = write_corpus(tmp_path / "telephone", {"train": 3, "dev": 1}, words=(1, 2))
    for path in root.rglob("*.flac"):
        audio, rate = soundfile.read(path)
        spectrum = np.fft.rfft(audio)
        spectrum[np.fft.rfftfreq(len(audio), 1 / rate) > 3000] = 0
        soundfile.write(path, np.fft.irfft(spectrum, len(audio)), rate)
    options = {"attn_implementation": "favor+", "max_train_steps": 1}
    results = train(data_dir=root, flags=("causal",), **options)
    assert np.isfinite(results["train_loss"])
    extractor = AutoProcessor.from_pretrained(tmp_path / "run").feature_extractor
    assert (extractor.normalize, min(extractor.std)) == ("none", 0.1)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Folders of noise and of impulse responses."""
    root, source = tmp_path_factory.mktemp("sounds"), np.random.default_rng(0)
    for name, samples, rate in (("noise/hum", 9000, 8000), ("noise/wind", 90000, 16000), ("rooms/hall", 2000, 16000)):
        (root / name).parent.mkdir(exist_ok=True)
        soundfile.write(root / f"{name}.wav", 0.1 * source.normal(size=samples), rate)
    return root


RESUMED = {
    "Conformer": EXACT | {"architecture": "transducer", "dynamic_chunk": 0.5, "gradient_accumulation_steps": 2},
    "Whisper": WHISPER | {"join_seconds": 5, "reverb_dir": "synthetic", "ema_decay": 0.0},
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_repeats_the_uninterrupted_run(name, training, sounds, whisper, corpus, tmp_path):
    """With all that is drawn in a training, the average of the weights, and a teacher; the Whisper hears shards."""
    for split, place in (("train", slice(4)), ("train", slice(4, None)), ("dev", slice(None))):
        shard = tmp_path / "shards" / f"{split}-{place.start or 0}.tar"
        write_shard(shard, members(load_speech(corpus, split)[0][place]))
    steps = {"max_train_steps": 4, "checkpointing_steps": 3}
    more = {"noise_dir": sounds / "noise", "reverb_dir": sounds / "rooms", "whisper_teacher": whisper}
    settings = RESUMED[name] | (more if name == "Conformer" else {"data_dir": tmp_path / "shards"})
    whole, resumed = whole_and_resumed(partial(training, settings), tmp_path, 3, **steps)
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["history"] == whole["history"]


def test_two_processes_that_cut_recordings_are_one(training, corpus, tmp_path):
    """Also when they resume what one process began."""
    backend = {"attn_implementation": "favor+"}
    training(CONFORMER, "still", dropout=0, max_train_steps=1, **backend)
    more = CONFORMER | AGAIN | backend | {"model_name_or_path": tmp_path / "still", "data_dir": corpus, "seed": 1}
    more |= {"max_train_steps": 4, "checkpointing_steps": 2}
    whole = training(more, "whole")
    with stopped_after(2):
        training(more, "cut")
    words = options(more | {"output_dir": tmp_path / "cut", "sequence_parallel": 2})
    assert "continuing from checkpoint-2" in fork("favor.train.asr", *words, "--resume", processes=2)
    cut = json.loads((tmp_path / "cut" / "all_results.json").read_text())
    assert (cut["num_processes"], cut["metrics"]) == (2, whole["metrics"])
    assert cut["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all((first[name] - second[name]).abs().max() < 1e-4 for name in first)


def test_workers_change_nothing(train, sounds, tmp_path):
    drawn = {"speeds": "0.9 1.0 1.1", "noise_dir": sounds / "noise", "reverb_dir": "synthetic", "max_train_steps": 3}
    one = train("one", **drawn)
    other = train("other", dataloader_num_workers=1, **drawn)
    assert one["metrics"] == other["metrics"]
    assert same_weights(tmp_path / "one", tmp_path / "other")


def test_bfloat16_is_near_float32(train, fresh_accelerator):
    """Of a Transducer with a CTC head, which is all that there is."""
    options = {"architecture": "transducer", "ctc_weight": 0.3, "max_train_steps": 2}
    exact = train("no", mixed_precision="no", **options)["train_loss"]
    fresh_accelerator()
    found = train("bf16", mixed_precision="bf16", **options)["train_loss"]
    assert exact != found == pytest.approx(exact, rel=0.02)


def test_what_cannot_be_used_is_named_and_counted(train, tmp_path):
    root = write_corpus(tmp_path / "dirty", {"train": 6, "dev": 2})
    chapter = root / "LibriSpeech" / "train" / "1" / "7"
    (chapter / "1-7-0000.flac").write_bytes(b"")
    whole = (chapter / "1-7-0001.flac").read_bytes()
    (chapter / "1-7-0001.flac").write_bytes(whole[: len(whole) // 2])
    lines = (chapter / "1-7.trans.txt").read_text().splitlines()
    lines[2] = "1-7-0002 " + "ABCDEF " * 40
    (chapter / "1-7.trans.txt").write_text("\n".join(lines[:5]) + "\n")
    results = train(data_dir=root, max_bad=4, max_train_steps=1)
    bad = {name: reason for part in results["skipped"].values() for name, reason in part.items()}
    reasons = {"1-7-0000": "empty", "1-7-0001": "cut short|decoded", "1-7-0002": "frames", "1-7-0005": "no transcript"}
    assert_told({name.split()[0]: reason for name, reason in bad.items()}, reasons)
    assert results["utterances"]["train"] == 2
    # An evaluation leaves out what is too short for the encoder, whatever its transcript.
    other = root / "LibriSpeech" / "dev" / "2" / "7"
    soundfile.write(other / "2-7-0000.flac", np.zeros(1600, dtype=np.float32), 16000)
    again = train("short", data_dir=root, max_bad=4, max_train_steps=1)
    assert "too few for the encoder" in again["skipped"]["dev"][f"2-7-0000 ({other / '2-7-0000.flac'})"]
    assert again["utterances"]["dev"] == 1
    with pytest.raises(ValueError, match="1-7-000"):
        train("strict", data_dir=root, max_bad=3, max_train_steps=1)


def test_a_checkpoint_goes_on_as_what_it_is_with_another_backend_or_lends_its_encoder(train, tmp_path):
    train("first", architecture="transducer", ctc_weight=0.3, max_train_steps=1)
    path = {"model_name_or_path": tmp_path / "first", "max_train_steps": 1, **AGAIN}
    again = train("again", attn_implementation="favor+", num_features=8, **path)
    assert (again["attn_implementation"], again["favor"]["num_features"]) == ("favor+", 8)
    config = ConformerConfig.from_pretrained(tmp_path / "again")
    assert (config.architectures, config.ctc_weight) == (["ConformerForTransducer"], 0.3)
    assert again["parameters"] > train("ctc", architecture="ctc", **path)["parameters"]


def test_samples(corpus):
    """The features are those of transformers, masks lie on the speech, and labels leave out the first token."""
    processor, given = make_processor(), load_speech(corpus, "train")[0]
    plain = WhisperDataset(given, processor)[3]
    expected = processor(read_audio(given[3]), sampling_rate=16000, return_tensors="pt").input_features[0].T
    assert torch.equal(plain["input_features"], expected)
    ids = processor.tokenizer(" " + given[3].text.lower())["input_ids"]
    assert ids[0] == processor.tokenizer.convert_tokens_to_ids(SPECIAL[1])
    assert plain["labels"].tolist() == ids[1:]
    assert processor.tokenizer.decode(ids, skip_special_tokens=True).split() == given[3].text.lower().split()
    masked = WhisperDataset(given, processor, augment=SpecAugment(0, 0, 10, 0.3), seed=3)[3]["input_features"]
    end = int(given[3].seconds * 100) + 1
    assert (masked[:end] == 0).all(1).sum() > 3
    assert torch.equal(masked[end:], expected[end:])
    data = WhisperDataset(given, processor, dither=1e-2, seed=3)
    one, same, other = (data[key]["input_features"] for key in (3, (0, 3), (1, 3)))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    louder = WhisperDataset(given, processor, acoustics=lambda sound, *_: sound * 10**0.3)[3]["input_features"]
    doubled = processor(read_audio(given[3]) * 10**0.3, sampling_rate=16000, return_tensors="pt").input_features[0].T
    torch.testing.assert_close(louder, doubled)
    assert not torch.equal(louder, expected)
    batch = collate_whisper([WhisperDataset(given, processor)[i] for i in range(3)], with_index=True)
    assert batch["input_features"].shape == (3, 80, FRAMES)
    assert batch["index"].tolist() == [0, 1, 2]
    assert (batch["labels"] == -100).any()
    capitals, small = label_ids(processor.tokenizer, ["BAD CAB", "bad cab"])
    assert capitals == small
    assert label_ids(processor.tokenizer, []) == []


def test_joined_utterances(corpus):
    lengths = {("1", "a"): [3, 9, 20, 5, 26], ("1", "b"): [2], ("2", "b"): [2, 3, 30], (None, None): [1, 1]}
    rows = [(*place, i, seconds) for place, own in lengths.items() for i, seconds in enumerate(own)]
    given = [Utterance(f"{who}{where}{i}", f"T{i}", b"", seconds, who, where) for who, where, i, seconds in rows]
    found = join(given, 26)
    names = "1a0..1a1 1a2..1a3 1a4 1b0 2b0..2b1 2b2 NoneNone0 NoneNone1"
    assert [one.id for one in found] == names.split()
    assert [one.seconds for one in found] == [12, 25, 26, 2, 5, 30, 1, 1]
    assert (found[0].text, found[0].speaker, found[0].chapter) == ("T0 T1", "1", "a")
    parts = load_speech(corpus, "dev")[0]
    whole = Utterance.joined(parts)
    assert read_audio(whole).tolist() == [number for part in parts for number in read_audio(part).tolist()]


def test_it_learns_and_is_loaded_with_its_attention(training, corpus, tmp_path):
    """The decoder stays exact. The saved folder gives the evaluation's words without being told the attention."""
    short = training(WHISPER, "short", max_train_steps=1, ema_decay=0)
    results = training(WHISPER, max_train_steps=30, ema_decay=0.5)
    assert results["train_loss"] < short["train_loss"] - 0.2
    assert {"dev_wer", "dev_cer"} <= set(results["metrics"])
    assert results["favor"]["encoder"]["num_features"] == 16
    given = {"model_name_or_path": tmp_path / "run", "learning_rate": 1e-5, "output_dir": "x"}
    given = Arguments.parse(options(given))
    saved = asr.make_processor(given, ())
    model = asr.make_model(given, saved, 0).eval()
    given, plain = load_speech(corpus, "dev")[0], asr.normalizer(model, saved.tokenizer)
    said = recognise(model, saved, given, batch_seconds=12)[0]
    pairs = [(plain(one.text), plain(text)) for one, text in zip(given, said, strict=True)]
    assert asr.errors(pairs)["wer"] == results["metrics"]["dev_wer"]
    runs = [layer.runs for layer in favor.describe(model, FRAMES // 2).layers]
    assert [name == "exact" for name in runs] == [False, False, True, True]


def test_long_transcripts_are_left_out():
    given = [Utterance("a", "BAD " * 9, b"", 2.0), Utterance("b", "BAD", b"", 2.0)]
    processor, skipped = make_processor(), Skipped(1)
    assert [one.id for one in fitting(given, processor, skipped, slowest=1.0, most=8)] == ["b"]
    assert skipped.reasons == {"a (0 bytes)": "12 tokens, and the decoder has 8 places"}
    assert len(fitting(given, processor, Skipped(), slowest=1.0, most=None)) == 2


def weights(folder):
    return load_file(folder / "model.safetensors")


def changed(folder, other):
    """Names of the weights that are others in a folder."""
    return {name for name in other if not torch.equal(weights(folder)[name], other[name])}


def test_a_frozen_encoder_stays_and_a_trained_one_changes(training, whisper, tmp_path, corpus):
    """First the head alone, then all, and the evaluation finds the words of the training."""
    first = training(HEAD, "head", encoder_learning_rate=0, ema_decay=0)
    before = {name.removeprefix("model."): one for name, one in weights(whisper).items()}
    encoder = {name: one for name, one in before.items() if name.startswith("encoder.")}
    assert changed(tmp_path / "head", encoder) == set()
    assert first["train_loss"] > 0
    rest = {"tokenizer_type": None, "architecture": None, "model_name_or_path": tmp_path / "head"}
    whole = training(HEAD, "all", max_train_steps=12, ema_decay=0.5, **rest)
    assert whole["train_loss"] < first["train_loss"]
    kept = {name for name in encoder if "embed_positions" in name or "k_proj.bias" in name}
    assert changed(tmp_path / "all", encoder) >= set(encoder) - kept - {"encoder.layers.0.fc2.bias"}
    given = {"model_name_or_path": tmp_path / "all", "data_dir": corpus, "eval_splits": "dev", "device": "cpu"}
    assert evaluation.main(options(given | {"output_dir": tmp_path})) == 0
    found = json.loads((tmp_path / "asr.json").read_text())
    assert found["architecture"] == "WhisperForCTC"
    assert found["splits"]["dev"]["searches"]["greedy"]["wer"] == pytest.approx(whole["metrics"]["dev_wer"])


def test_a_linear_backend_is_trained_and_kept(training, tmp_path):
    more = {"attn_implementation": "landmark", "num_features": 16, "selected_keys": 8, "exact_below": 0}
    results = training(HEAD, dropout=0.2, **more)
    assert results["attn_implementation"] == "landmark"
    again = WhisperForCTC.from_pretrained(tmp_path / "run")
    assert again.config._attn_implementation == "landmark"
    assert again.config.head_dropout == 0.2
    assert (again.config.favor["num_features"], again.config.favor["selected_keys"]) == (16, 8)


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
    processor = tiny_speech.make_processor("BAD", feature_size=80)
    teacher = WhisperTeacher(str(whisper), torch.device("cpu")).extractor
    noises = ({}, {"acoustics": lambda sound, *_: 5 * sound, "dither": 0.1})
    one, other = (SpeechDataset(said, processor, speeds=(0.9,), teacher=teacher, **own)[0, 0] for own in noises)
    assert not torch.allclose(one["input_features"], other["input_features"])
    assert torch.equal(one["teacher_features"], other["teacher_features"])
    slower = SpeechDataset(said, processor, teacher=teacher)[0, 0]
    assert len(one["teacher_features"]) == pytest.approx(len(slower["teacher_features"]) / 0.9, abs=2)
    batch = collate([one, slower])
    assert batch["teacher_mask"].sum(1).tolist() == [len(one["teacher_features"]), len(slower["teacher_features"])]
    assert set(batch) == {"input_features", "attention_mask", "labels", "teacher_features", "teacher_mask"}


def test_an_encoder_that_is_not_trained_keeps_the_statistics_of_its_batch_normalisation(training, models, tmp_path):
    """Which no gradient changes, but a pass in training mode does; a Whisper, the other test's encoder, has none."""
    rest = {"model_name_or_path": models / "conformer", **AGAIN}
    training(EXACT, encoder_learning_rate=0, max_train_steps=2, ema_decay=0, **rest)
    assert changed(tmp_path / "run", weights(models / "conformer")) == {"ctc_head.weight", "ctc_head.bias"}


def test_a_model_of_chunks_is_evaluated_in_chunks_and_streams(training, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(objective, "CHUNK_SECONDS", (0.08, 0.4))
    trained = training(EXACT, dynamic_chunk=0.7, max_train_steps=12, ema_decay=0.5)
    given = {"model_name_or_path": tmp_path / "run", "data_dir": corpus, "eval_splits": "dev", "device": "cpu"}
    rates = []
    for more in ({}, {"chunk_seconds": 0.16}, {"chunk_seconds": 0.16, "left_chunks": 1}):
        assert evaluation.main(options(given | more | {"output_dir": tmp_path / "errors"})) == 0
        found = json.loads((tmp_path / "errors" / "asr.json").read_text())
        rates.append((found["chunks"], found["splits"]["dev"]["searches"]["greedy"]["cer"]))
    assert [chunks for chunks, _ in rates] == [None, "0.16 s, all before each", "0.16 s, 1 before each"]
    assert rates[0][1] == pytest.approx(trained["metrics"]["dev_cer"])
    model = ConformerForCTC.from_pretrained(tmp_path / "run").eval()
    stream = model.transcribe_stream(chunks=Chunks(4))
    assert stream.feed(np.zeros(20000, np.float32)) == []


def test_ctc_on_a_whisper_teaches_too_and_leaves_no_trace_but_the_weights(training, models, tmp_path):
    taught = training(EXACT, whisper_teacher=models / "ctc", dropout=0, architecture="transducer")
    assert taught["train_loss"] != training(EXACT, "plain", dropout=0, architecture="transducer")["train_loss"]
    assert not any(name.startswith(("projection", "student")) for name in weights(tmp_path / "run"))


CHUNKS = {"dynamic_chunk": 0.5}
ON_CTC = {"model_name_or_path": "ctc", "tokenizer_type": None}
DECIDED = "has no effect, because --model_name_or_path already decides it"


def test_what_cannot_be_is_refused(training, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    # A Whisper with features that its encoder does not take.
    shutil.copytree("whisper", tmp_path / "wide", ignore=shutil.ignore_patterns("*processor*"))
    WhisperFeatureExtractor(feature_size=40, chunk_length=6).save_pretrained(tmp_path / "wide")
    for settings, more, message in (
        (CONFORMER, {"preset": "huge"}, "preset must be one of tiny, small, paper"),
        (CONFORMER, {"ema_decay": 1}, "ema_decay must be at least 0 and less than 1"),
        (CONFORMER, {"speeds": "0"}, "speeds must be greater than 0"),
        (CONFORMER, {"train_split": "nowhere"}, "split must be a folder .* dev, train"),
        (CONFORMER, {"vocab_size": 4000, "tokenizer_type": "unigram"}, "vocab_size must be at most"),
        (CONFORMER, {"per_device_train_batch_seconds": 0.5}, "per_device_train_batch_seconds|max_seconds"),
        (CONFORMER, {"ctc_weight": 0.3}, "ctc_weight is an option of --architecture transducer"),
        (CONFORMER, AGAIN | {"model_name_or_path": "conformer", "vocab_size": 40}, f"vocab_size {DECIDED}"),
        (EXACT, {"dynamic_chunk": 1.5}, "dynamic_chunk must be at least 0 and at most 1"),
        (EXACT, CHUNKS | {"causal": ""}, "a causal model streams without them"),
        (CONFORMER, CHUNKS, r"call favor\.calibrate first, or use favor\+ or sdpa"),
        (EXACT, CHUNKS | {"attn_implementation": "landmark"}, r"use favor\+ with window=0, or sdpa"),
        (EXACT, CHUNKS | AGAIN | {"model_name_or_path": "conformer"}, "chunks cannot wait for the whole utterance"),
        (EXACT, {"whisper_teacher": "conformer"}, r"teacher must be a Whisper, or CTC on its .* holds conformer"),
        (HEAD, {"whisper_teacher": "whisper"}, "whisper_teacher is for Conformers, got WhisperForCTC"),
        (EXACT, CHUNKS | {"sequence_parallel": 2}, "does not go with dynamic_chunk and whisper_teacher"),
        (HEAD, CHUNKS, "dynamic_chunk is for Conformers, got WhisperForCTC: leave it out"),
        (EXACT, {"whisper_teacher": tmp_path / "wide"}, r"input_features must be \[batch, time, 80\], got .*40"),
        (HEAD, {"encoder_learning_rate": None}, "a learning rate of 0.002 destroys the pretrained encoder"),
        (HEAD, {"encoder_learning_rate": -1}, "encoder_learning_rate must be at least 0, got -1"),
        (HEAD, {"preset": "tiny"}, f"preset {DECIDED}"),
        (HEAD, {"num_features": 16}, "num_features: options of FAVOR attention, not of sdpa"),
        (HEAD, ON_CTC | {"architecture": "transducer"}, "transducer does not fit: .* CTC on the encoder of"),
        (HEAD, ON_CTC | {"architecture": None, "tokenizer_type": "char"}, "tokenizer_type has no effect"),
        (WHISPER, {"learning_rate": 1e-3}, "a learning rate of 0.001 destroys a pretrained Whisper"),
        (WHISPER, {"architecture": "transducer"}, "--architecture transducer does not fit: .* holds a Whisper"),
        (WHISPER, {"encoder_learning_rate": 1e-5}, "encoder_learning_rate is for CTC and Transducer: leave it out"),
        (WHISPER, {"attn_implementation": "sdpa"}, "num_features, exact_below: options of FAVOR attention, not of"),
        (WHISPER, {"preset": "tiny"}, f"preset {DECIDED}"),
        (WHISPER, {"speeds": "0.1"}, "s at the slowest speed, and this Whisper hears 6"),
        (WHISPER, {"model_name_or_path": None, "architecture": "whisper"}, "name one with --model_name_or_path"),
    ):
        with pytest.raises(ValueError, match=message):
            training(settings, **more)
    for model, message in (
        (tiny_speech.build(ConformerForCTC), "sdpa attention would see"),
        (None, "2 is for Conformers; a Whi"),
    ):
        with pytest.raises(ValueError, match=message):
            asr.make_pieces(None, model, 2)
