"""Error rates of CTC on Whisper's encoder, pass by pass, and the second scores against transformers' own loss."""

import json
from importlib.util import find_spec

import pytest
import torch
from speech import WORDS, write_corpus
from tiny_whisper import SPECIAL, make_processor, save

from favor.eval import whisper_ctc
from favor.eval.speech.rescoring import best_texts, text_scores
from favor.eval.whisper import load
from favor.models.conformer import write_arpa
from favor.train import asr
from favor.train.speech.data import read_audio
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors

needs_search = pytest.mark.skipif(find_spec("flashlight") is None, reason="needs flashlight-text, of the extra lm")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a Whisper, and a model that was trained for a few steps."""
    place = tmp_path_factory.mktemp("place")
    write_corpus(place, {"train": 10, "dev": 3, "test": 3})
    save(place / "whisper", make_processor())
    write_arpa([" ".join(WORDS), "BAD CAB"], place / "lm.arpa", order=2)
    words = ["--data_dir", str(place), "--model_name_or_path", str(place / "whisper"), "--architecture", "ctc"]
    words += ["--tokenizer_type", "char", "--encoder_learning_rate", "4e-4", "--max_train_steps", "30"]
    asr.main([*words, "--max_batch_seconds", "24", "--ema_decay", "0", "--output_dir", str(place / "model")])
    return place


def call(place, *words):
    assert whisper_ctc.main([str(place / "model"), "--data_dir", str(place), "--output_dir", str(place), *words]) == 0
    return json.loads((place / "whisper_ctc.json").read_text())


def test_greedy_search(place):
    content = call(place)
    assert [(row["split"], row["search"]) for row in content["rows"]] == [("dev", "greedy"), ("test", "greedy")]
    assert content["chosen"] == {}
    for row in content["rows"]:
        references = [one.text for one in load_speech(place, row["split"])[0]]
        assert row["wer"] == word_errors(references, row["texts"]).rate
    assert str(place) not in (place / "whisper_ctc.md").read_text()


@needs_search
def test_all_passes(place):
    options = ["--lm_weights", "0", "1", "--word_scores", "1", "--beam_size", "6", "--tune_beam_size", "4"]
    options += [
        "--whisper",
        str(place / "whisper"),
        "--texts",
        "3",
        "--whisper_weights",
        "0",
        "1",
        "--max_samples",
        "2",
    ]
    content = call(place, "--language_model", str(place / "lm.arpa"), *options)
    names = ["greedy", "language model", "rescored by Whisper"]
    assert [row["search"] for row in content["rows"]] == names * 2
    assert set(content["chosen"]) == {"lm_weight", "word_score", "whisper_weight"}
    tuned = {row["search"]: row["wer"] for row in content["rows"] if row["split"] == "dev"}
    assert tuned["rescored by Whisper"] <= tuned["language model"]
    assert content["utterances"]["split"][0] == 2


def test_second_scores_are_those_of_transformers(place):
    model, processor = load(place / "whisper")
    utterances = load_speech(place, "dev")[0][:2]
    texts = [[("BAD CAB", -1.0), ("FACE", -2.0)], [("ACE", -1.0)]]
    found = text_scores(model, processor, utterances, texts)
    start = processor.tokenizer.convert_tokens_to_ids(SPECIAL[1])
    assert model.config.decoder_start_token_id == start
    for utterance, own, scores in zip(utterances, texts, found, strict=True):
        inputs = processor(read_audio(utterance), sampling_rate=16000, return_tensors="pt")
        for (text, _), score in zip(own, scores, strict=True):
            labels = torch.tensor([processor.tokenizer(" " + text.lower())["input_ids"][1:]])
            with torch.no_grad():
                loss = model(inputs.input_features, labels=labels).loss
            assert score == pytest.approx(-float(loss) * labels.numel(), rel=1e-4)


def test_the_best_sum_is_chosen():
    texts = [[("A", -1.0), ("B", -2.0)], [("C", 0.0)]]
    assert best_texts(texts, [[-9.0, -1.0], [-3.0]], 0.0) == ["A", "C"]
    assert best_texts(texts, [[-9.0, -1.0], [-3.0]], 1.0) == ["B", "C"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--whisper", "w"], "--whisper rescores the texts of the beam search, so it needs --language_model"),
        (["--texts", "0"], "--texts and --max_samples must be at least 1"),
    ],
)
def test_what_the_command_refuses(words, message, capsys):
    with pytest.raises(SystemExit):
        whisper_ctc.main(["model", "--data_dir", "data", *words])
    assert message in capsys.readouterr().err
