"""Fine-tuning of a Whisper whose encoder has linear attention: samples, training, saving, resuming, refusals."""

import pytest
import torch
from stopping import whole_and_resumed
from tiny_whisper import FRAMES, SPECIAL, make_processor

import favor
from favor.eval.asr import recognise
from favor.train import asr
from favor.train.speech.arguments import Arguments
from favor.train.speech.augment import SpecAugment
from favor.train.speech.batches import WhisperDataset, collate_whisper, fitting, label_ids
from favor.train.speech.data import Skipped, Utterance, join, read_audio
from favor.train.speech.sources import load_speech

SETTINGS = {"attn_implementation": "favor#", "num_features": 16, "exact_below": 0, "max_train_steps": 4}
SETTINGS |= {"per_device_train_batch_seconds": 24, "learning_rate": 4e-4}


@pytest.fixture(scope="module")
def processor():
    return make_processor()


def utterances(corpus, split):
    return load_speech(corpus, split)[0]


def test_samples(corpus, processor):
    """The features are those of transformers, masks lie on the speech, and labels leave out the first token."""
    given = utterances(corpus, "train")
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
    noisy = [
        WhisperDataset(given, processor, dither=1e-2, seed=3)[key]["input_features"] for key in (3, (0, 3), (1, 3))
    ]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])
    louder = WhisperDataset(given, processor, acoustics=lambda sound, *_: sound * 10**0.3)[3]["input_features"]
    doubled = processor(read_audio(given[3]) * 10**0.3, sampling_rate=16000, return_tensors="pt").input_features[0].T
    torch.testing.assert_close(louder, doubled)
    assert not torch.equal(louder, expected)
    batch = collate_whisper([WhisperDataset(given, processor)[i] for i in range(3)], with_index=True)
    assert batch["input_features"].shape == (3, 80, FRAMES)
    assert batch["index"].tolist() == [0, 1, 2]
    assert (batch["labels"] == -100).any()


def test_letters_are_small_if_all_are_capitals(processor):
    capitals, mixed = label_ids(processor.tokenizer, ["BAD CAB", "bad cab"])
    assert capitals == mixed
    assert label_ids(processor.tokenizer, []) == []


def test_joined_utterances(corpus):
    lengths = {("1", "a"): [3, 9, 20, 5, 26], ("1", "b"): [2], ("2", "b"): [2, 3, 30], (None, None): [1, 1]}
    given = [
        Utterance(f"{speaker}{chapter}{i}", f"T{i}", b"", seconds, speaker, chapter)
        for (speaker, chapter), own in lengths.items()
        for i, seconds in enumerate(own)
    ]
    found = join(given, 26)
    assert [one.id for one in found] == [
        "1a0..1a1", "1a2..1a3", "1a4", "1b0", "2b0..2b1", "2b2", "NoneNone0", "NoneNone1",
    ]  # fmt: skip
    assert [one.seconds for one in found] == [12, 25, 26, 2, 5, 30, 1, 1]
    assert (found[0].text, found[0].speaker, found[0].chapter) == ("T0 T1", "1", "a")
    parts = utterances(corpus, "dev")
    whole = Utterance.joined(parts)
    assert read_audio(whole).tolist() == [number for part in parts for number in read_audio(part).tolist()]


def test_it_learns_and_is_loaded_with_its_attention(train, corpus, tmp_path):
    """The decoder stays exact. The saved folder gives the evaluation's words without being told the attention."""
    short = train("short", max_train_steps=1, ema_decay=0)
    results = train(max_train_steps=30, ema_decay=0.5)
    assert results["train_loss"] < short["train_loss"] - 0.2
    assert {"dev_wer", "dev_cer"} <= set(results["metrics"])
    assert results["favor"]["encoder"]["num_features"] == 16
    given = Arguments.parse(
        ["--model_name_or_path", str(tmp_path / "run"), "--learning_rate", "1e-5", "--output_dir", "x"], "", ""
    )
    saved = asr.make_processor(given, ())
    model = asr.make_model(given, saved, 0).eval()
    said = recognise(model, saved, utterances(corpus, "dev"), batch_seconds=12)[0]
    plain = asr.normalizer(model, saved.tokenizer)
    pairs = [(plain(one.text), plain(text)) for one, text in zip(utterances(corpus, "dev"), said, strict=True)]
    assert asr.errors(pairs)["wer"] == results["metrics"]["dev_wer"]
    runs = [layer.runs for layer in favor.describe(model, FRAMES // 2).layers]
    assert [name == "exact" for name in runs] == [False, False, True, True]


def test_resume_repeats_the_uninterrupted_run(train, tmp_path):
    settings = {"max_train_steps": 5, "checkpointing_steps": 2, "join_seconds": 5}
    settings |= {"reverb_dir": "synthetic"}
    whole, resumed = whole_and_resumed(train, tmp_path, 4, **settings)
    assert resumed["metrics"] == whole["metrics"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 1e-3}, "a learning rate of 0.001 destroys a pretrained Whisper"),
        ({"architecture": "transducer"}, "--architecture transducer does not fit: .* holds a Whisper"),
        ({"encoder_learning_rate": 1e-5}, "encoder_learning_rate is for CTC and Transducer: leave it out"),
        ({"attn_implementation": "sdpa"}, "num_features, exact_below: options of FAVOR attention, not of sdpa"),
        ({"preset": "tiny"}, "preset has no effect, because --model_name_or_path already decides it"),
        ({"speeds": "0.1"}, "s at the slowest speed, and this Whisper hears 6"),
    ],
)
def test_what_cannot_be_is_refused(train, options, message):
    with pytest.raises(ValueError, match=message):
        train(**options)


def test_a_whisper_is_not_made_new(train):
    with pytest.raises(ValueError, match="name one with --model_name_or_path"):
        train(model_name_or_path=None, architecture="whisper")


def test_long_transcripts_are_left_out(processor):
    given = [Utterance("a", "BAD " * 9, b"", 2.0), Utterance("b", "BAD", b"", 2.0)]
    skipped = Skipped(1)
    assert [one.id for one in fitting(given, processor, skipped, slowest=1.0, most=8)] == ["b"]
    assert skipped.reasons == {"a (0 bytes)": "12 tokens, and the decoder has 8 places"}
    assert len(fitting(given, processor, Skipped(), slowest=1.0, most=None)) == 2
