"""The speech training program: it learns, resumes, averages, refuses and counts."""

import numpy as np
import pytest
import soundfile
import torch
from speech import write_corpus
from stopping import same_weights, whole_and_resumed
from transformers import AutoModelForCTC, AutoProcessor

from favor.models.conformer import ConformerConfig
from favor.train.common.loop import weight_average

SETTINGS = {"preset": "tiny", "tokenizer_type": "char", "attn_implementation": "favor#", "num_features": 16}
SETTINGS |= {"exact_below": 0, "per_device_train_batch_seconds": 8, "max_train_steps": 6, "learning_rate": 2e-3}
PLAIN = {"speeds": "1", "spec_augment": "0 0 0 0"}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Five utterances of one word each."""
    return write_corpus(tmp_path_factory.mktemp("short"), {"train": 5, "dev": 1}, words=(1, 2))


@pytest.mark.slow
def test_five_utterances_are_learned_by_heart(train, short, tmp_path):
    options = {**PLAIN, "dropout": 0, "ema_decay": 0.9, "eval_splits": "train", "data_dir": short}
    results = train(max_train_steps=80, **options)
    assert results["metrics"]["train_wer"] < 5
    assert results["utterances"] == {"train": 5}
    # What was saved says the same to a user of transformers.
    model, processor = (kind.from_pretrained(tmp_path / "run") for kind in (AutoModelForCTC, AutoProcessor))
    chapter = short / "LibriSpeech" / "train" / "1" / "7"
    lines = (chapter / "1-7.trans.txt").read_text().splitlines()
    name, text = lines[0].split(" ", 1)
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


@pytest.mark.slow
def test_a_transducer_learns(train, short):
    options = {**PLAIN, "data_dir": short, "architecture": "transducer", "eval_splits": "train"}
    first = train("first", max_train_steps=1, **options)
    last = train("last", max_train_steps=40, **options)
    assert last["train_loss"] < 0.6 * first["train_loss"]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Folders of noise and of impulse responses."""
    root, source = tmp_path_factory.mktemp("sounds"), np.random.default_rng(0)
    for name, samples, rate in (("noise/hum", 9000, 8000), ("noise/wind", 90000, 16000), ("rooms/hall", 2000, 16000)):
        (root / name).parent.mkdir(exist_ok=True)
        soundfile.write(root / f"{name}.wav", 0.1 * source.normal(size=samples), rate)
    return root


NOISY = {"noise_dir": "noise", "reverb_dir": "rooms"}


@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.0, "gradient_accumulation_steps": 2, **NOISY},
        {"architecture": "transducer", "attn_implementation": "favor+"},
    ],
    ids=["accumulation and noise", "average"],
)
def test_resume_repeats_the_uninterrupted_run(train, sounds, tmp_path, monkeypatch, options):
    monkeypatch.chdir(sounds)
    settings = {"max_train_steps": 6, "checkpointing_steps": 2, **options}
    whole, resumed = whole_and_resumed(train, tmp_path, 4, **settings)
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["history"] == whole["history"]


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
    assert found == pytest.approx(exact, rel=0.02)
    assert found != exact


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
    for number, reason in ((0, "empty"), (1, "cut short|decoded"), (2, "tokens|frames"), (5, "no transcript")):
        own = [why for name, why in bad.items() if f"1-7-000{number}" in name]
        assert len(own) == 1, bad
        assert any(part in own[0] for part in reason.split("|")), own
    assert results["utterances"]["train"] == 2
    # An evaluation leaves out what is too short for the encoder, whatever its transcript.
    other = root / "LibriSpeech" / "dev" / "2" / "7"
    soundfile.write(other / "2-7-0000.flac", np.zeros(1600, dtype=np.float32), 16000)
    again = train("short", data_dir=root, max_bad=4, max_train_steps=1)
    assert "too few for the encoder" in again["skipped"]["dev"][f"2-7-0000 ({other / '2-7-0000.flac'})"]
    assert again["utterances"]["dev"] == 1
    with pytest.raises(ValueError, match="1-7-000"):
        train("strict", data_dir=root, max_bad=3, max_train_steps=1)


def test_going_on_from_a_checkpoint_with_another_backend(train, tmp_path):
    train("first", attn_implementation="sdpa", num_features=None, exact_below=None, max_train_steps=1)
    path = {"model_name_or_path": tmp_path / "first", "preset": None, "tokenizer_type": None, "max_train_steps": 1}
    results = train("second", num_features=8, **path)
    assert results["attn_implementation"] == "favor#"
    assert results["favor"]["num_features"] == 8
    with pytest.raises(ValueError, match="vocab_size has no effect, because --model_name_or_path already decides it"):
        train("third", vocab_size=40, **path)


def test_a_checkpoint_goes_on_as_what_it_is_or_lends_its_encoder(train, tmp_path):
    train("first", architecture="transducer", ctc_weight=0.3, max_train_steps=1)
    path = {"model_name_or_path": tmp_path / "first", "preset": None, "tokenizer_type": None, "max_train_steps": 1}
    again = train("again", **path)
    config = ConformerConfig.from_pretrained(tmp_path / "again")
    assert (config.architectures, config.ctc_weight) == (["ConformerForTransducer"], 0.3)
    assert again["parameters"] > train("ctc", architecture="ctc", **path)["parameters"]
    with pytest.raises(ValueError, match="ctc_weight is an option of --architecture transducer"):
        train("none", ctc_weight=0.3)


def test_the_average_follows_the_weights():
    model = torch.nn.Linear(2, 1, bias=False)
    average = weight_average(model, 0.5)
    expected = None
    for count, value in enumerate([1.0, 2.0, 5.0, -3.0]):
        torch.nn.init.constant_(model.weight, value)
        average.update_parameters(model)
        rate = min(0.5, (1 + count) / (10 + count))
        expected = value if expected is None else rate * expected + (1 - rate) * value
        torch.testing.assert_close(average.module.weight, torch.full((1, 2), expected))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "huge"}, "preset must be one of tiny, small, paper"),
        ({"ema_decay": 1}, "ema_decay must be at least 0 and less than 1"),
        ({"speeds": "0"}, "speeds must be greater than 0"),
        ({"train_split": "nowhere"}, "split must be a folder .* dev, train"),
        ({"vocab_size": 4000, "tokenizer_type": "unigram"}, "vocab_size must be at most"),
        ({"per_device_train_batch_seconds": 0.5}, "per_device_train_batch_seconds|max_seconds"),
    ],
)
def test_bad_arguments_are_refused(train, values, message):
    with pytest.raises(ValueError, match=message):
        train(**values)
