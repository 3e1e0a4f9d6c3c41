"""Error rates of CTC on Whisper's encoder, pass by pass, and the second scores against transformers' own loss."""

import json
from pathlib import Path

import pytest
import torch
from launching import isolated_here
from marks import needs_search
from speech import WORDS, write_corpus
from tiny_causal import save_causal
from tiny_whisper import SPECIAL, make_processor, save

from favor.eval import asr as evaluation
from favor.eval import whisper_ctc, whisper_ctc_long
from favor.eval.language.models import load as load_language_model
from favor.eval.speech import scores as scoring
from favor.eval.speech.scores import language_scores, rescored, text_scores, texts_before
from favor.eval.whisper import load
from favor.eval.whisper_ctc_long import WAYS
from favor.models.speech import ConformerProcessor, WordLexicon, write_arpa
from favor.train import asr
from favor.train.common.arguments import BackendArguments
from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a Whisper, and a model that was trained for a few steps."""
    place = tmp_path_factory.mktemp("place")
    write_corpus(place, {"train": 10, "dev": 3, "test": 3})
    save(place / "whisper", make_processor())
    write_arpa([" ".join(WORDS), "BAD CAB"], place / "lm.arpa", order=2)
    words = ["--data_dir", str(place), "--model_name_or_path", str(place / "whisper"), "--architecture", "ctc"]
    words += ["--tokenizer_type", "char", "--encoder_learning_rate", "4e-4", "--max_train_steps", "12"]
    asr.main(
        [*words, "--per_device_train_batch_seconds", "24", "--ema_decay", "0", "--output_dir", str(place / "model")]
    )
    return place


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """The folder of a causal language model."""
    folder = tmp_path_factory.mktemp("causal") / "llama"
    save_causal(folder)
    return folder


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
def test_all_passes(place, causal):
    options = (
        "--lm_weights 0 1 --word_scores 1 --beam_size 6 --choose_beam_size 4 --rescored_texts 3 --max_eval_samples 2"
    )
    options += " --causal_weights 0 1 --context_texts 2 --ngram_weights 0 1 --whisper_weights 0 1"
    places = ["--language_model", place / "lm.arpa", "--causal_model", causal, "--whisper", place / "whisper"]
    content = call(place, *map(str, places), *options.split())
    names = ["greedy", "language model", "rescored by llama", "rescored by Whisper"]
    assert [row["search"] for row in content["rows"]] == names * 2
    weights = {"lm_weight", "word_score", "weight of the n-gram with llama"}
    assert set(content["chosen"]) == {*weights, "weight of llama", "weight of Whisper"}
    tuned = [row["wer"] for row in content["rows"] if row["split"] == "dev"][1:]
    assert tuned == sorted(tuned, reverse=True)
    assert content["utterances"]["split"][0] == 2


@pytest.mark.parametrize("at_once", [1, 32])
def test_second_scores_are_those_of_transformers(place, monkeypatch, at_once):
    monkeypatch.setattr(scoring, "TEXTS", at_once)
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


@pytest.mark.parametrize("at_once", [1, 32])
def test_scores_of_a_causal_model_are_those_of_transformers(causal, monkeypatch, at_once):
    monkeypatch.setattr(scoring, "TEXTS", at_once)
    model, tokenizer = load_language_model(str(causal))
    found = language_scores(model, tokenizer, [[("BAD CAB", -1.0), ("FACE", -2.0)], [("Ace", -1.0)]])
    for text, score in zip(["bad cab", "face", "Ace"], [*found[0], *found[1]], strict=True):
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text + "\n").input_ids]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        assert score == pytest.approx(-float(loss) * (ids.shape[1] - 1), rel=1e-4)


@pytest.mark.parametrize("at_once", [1, 32])
def test_a_causal_model_reads_what_was_said_before(causal, monkeypatch, at_once):
    monkeypatch.setattr(scoring, "TEXTS", at_once)
    model, tokenizer = load_language_model(str(causal))
    texts = [[("BAD CAB", -1.0), ("FACE", -2.0)], [("ACE", -1.0)]]
    found = language_scores(model, tokenizer, texts, [["A BED", "DAD"], []])
    ids = tokenizer("a bed\n").input_ids + tokenizer("dad\n").input_ids
    for text, said, score in zip(["bad cab", "face", "ace"], [ids, ids, []], [*found[0], *found[1]], strict=True):
        own = tokenizer(text + "\n").input_ids
        row = torch.tensor([[tokenizer.eos_token_id, *said, *own]])
        with torch.no_grad():
            log_probs = model(input_ids=row).logits[0, :-1].log_softmax(-1)
        true = log_probs.gather(-1, row[0, 1:, None])[-len(own) :].sum()
        assert score == pytest.approx(float(true), rel=1e-4)


def test_texts_before_are_those_of_the_chapter():
    def at(speaker, chapter):
        return Utterance("id", "A", Path("a.wav"), speaker=speaker, chapter=chapter)

    utterances = [at("1", "1"), at("1", "1"), at("2", "1"), at("1", "1"), at(None, None), at(None, None)]
    texts = ["A", "B", "C", "D", "E", "F"]
    assert texts_before(utterances, texts, 1) == [[], ["A"], [], ["B"], [], []]
    assert texts_before(utterances, texts, 9) == [[], ["A"], [], ["A", "B"], [], []]
    assert texts_before(utterances, texts, 0) == [[]] * 6


def test_a_causal_model_without_a_first_token_is_refused(causal):
    model, tokenizer = load_language_model(str(causal))
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="bos_token or an eos_token"):
        language_scores(model, tokenizer, [[("A", 0.0)]])


def test_the_best_sum_comes_first():
    texts = [[("A", -1.0), ("B", -2.0)], [("C", 0.0)]]
    second, third = [[-9.0, -1.0], [-3.0]], [[8.0, 0.0], [2.0]]
    assert rescored(texts, [second], [0.0]) == texts
    assert rescored(texts, [second], [1.0]) == [[("B", -3.0), ("A", -10.0)], [("C", -3.0)]]
    assert rescored(texts, [second, third], [1.0, 0.5]) == [[("B", -3.0), ("A", -6.0)], [("C", -2.0)]]


@needs_search
def test_without_the_ngram_model_the_ctc_loss_of_torch_remains(place):
    tokenizer = ConformerProcessor.from_pretrained(place / "model").tokenizer
    lexicon = WordLexicon(tokenizer, place / "lm.arpa", lm_weight=2.0, word_score=0.0)
    logits = torch.randn(30, len(tokenizer), generator=torch.manual_seed(0)).mul(3).log_softmax(-1)
    texts = whisper_ctc.beam([logits], 0, lexicon, 20)
    found = rescored(texts, [whisper_ctc.ngram_scores(lexicon, texts)], [-2.0])[0]
    assert len(found) > 5
    assert [text for text, _ in found] != [text for text, _ in texts[0]]
    for text, score in found:
        labels = torch.tensor(tokenizer(text).input_ids)
        loss = torch.nn.functional.ctc_loss(
            logits, labels, torch.tensor(30), torch.tensor(len(labels)), reduction="sum"
        )
        assert score == pytest.approx(-float(loss), rel=1e-4)


def test_long_recordings(place, monkeypatch):
    """Every way has its row; windows and one pass of a short recording find the text of its only window."""
    monkeypatch.setattr(whisper_ctc_long, "isolated", isolated_here)
    monkeypatch.setattr(whisper_ctc_long, "EXACT_MINUTES", 0.04)
    times = ["--step", "0.2", "--look_ahead", "0.2", "--context", "1"]
    words = [str(place / "model"), "--data_dir", str(place), "--split", "dev", "--minutes", "0.03", "0.05", *times]
    words += ["--output_dir", str(place)]
    assert whisper_ctc_long.main(words) == 0
    cells = json.loads((place / "whisper_ctc_long.json").read_text())["cells"]
    assert [(cell["minutes"], cell["way"]) for cell in cells] == [(m, way) for m in (0.03, 0.05) for way in WAYS]
    status = {(cell["minutes"], cell["way"]): cell["status"] for cell in cells}
    assert {key for key, value in status.items() if value != "ok"} == {(0.05, "one pass, exact")}
    assert status[0.05, "one pass, exact"] == "skipped"
    short = {cell["way"]: cell for cell in cells if cell["minutes"] == 0.03}
    assert short["windows"]["text"] == short["one pass, exact"]["text"]
    assert all(cell["wer"] >= 0 and cell["peak_bytes"] > 1e7 for cell in cells if cell["status"] == "ok")


def test_times_are_compared_with_the_alignment(place):
    """Logits that say the transcript have its times; one word that is said later does not."""
    model, processor = evaluation.load(str(place / "model"), BackendArguments())
    utterance = Utterance("a", "BAD CAB", b"", 1.0)
    tokens = processor.tokenizer(utterance.text).input_ids
    row = torch.zeros(40, len(processor.tokenizer))
    row[:, 0] = 8.0
    row[range(0, 3 * len(tokens), 3), tokens] = 16.0
    found = whisper_ctc.time_errors([row, row], [utterance] * 2, processor, model.config)
    assert found == {"words": 4, "within": 1.0}
    wrong = whisper_ctc.time_errors([row], [Utterance("a", "BAD FACE", b"", 1.0)], processor, model.config)
    assert wrong["words"] == 1
