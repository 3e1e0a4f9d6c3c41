"""Training with phonemes as tokens: transcripts, what is saved, the next stage, evaluation by words, refusals."""

import json

import pytest
import torch
from launching import isolated_here, options
from marks import needs_search
from speech import WORDS, write_corpus
from tiny_whisper import make_processor, save

from favor.eval import asr as evaluation
from favor.eval import whisper_ctc, whisper_ctc_long
from favor.models.speech import ConformerProcessor, Pronunciations, WordLexicon, write_arpa
from favor.models.whisper_ctc import WhisperForCTC
from favor.train import asr, nst
from favor.train.speech.data import Skipped, Utterance, read_audio
from favor.train.speech.model import as_phonemes
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors


def lines(words):
    """Each letter is a phoneme of its own."""
    return "".join(f"{word}\t{' '.join(f'{letter}H' for letter in word)}\n" for word in words)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a lexicon, a Whisper, and a model of two stages."""
    place = tmp_path_factory.mktemp("place")
    write_corpus(place, {"train": 10, "dev": 3, "test": 3})
    save(place / "whisper", make_processor())
    (place / "lexicon.txt").write_text(lines(WORDS) + "BAD\tBH DH\n")
    write_arpa([" ".join(WORDS), "BAD CAB"], place / "lm.arpa", order=2, words=["UNSAID"])
    words = ["--data_dir", str(place), "--per_device_train_batch_seconds", "24", "--ema_decay", "0"]
    first = ["--model_name_or_path", str(place / "whisper"), "--architecture", "ctc", "--max_train_steps", "2"]
    first += ["--lexicon", str(place / "lexicon.txt"), "--encoder_learning_rate", "0"]
    asr.main([*words, *first, "--output_dir", str(place / "head")])
    second = ["--model_name_or_path", str(place / "head"), "--max_train_steps", "10", "--encoder_learning_rate", "4e-4"]
    results = asr.main([*words, *second, "--output_dir", str(place / "model")])
    return place, results


def test_both_stages_have_phonemes(place):
    folder, _ = place
    spoken = Pronunciations(folder / "lexicon.txt")
    assert Pronunciations(folder / "model/lexicon.txt").spoken == spoken.spoken
    tokenizer = ConformerProcessor.from_pretrained(folder / "model").tokenizer
    assert set(tokenizer.get_vocab()) == {"<pad>", "</s>", "<unk>", "▁", *(f"{one}H" for one in "ABCDEF")}
    assert WhisperForCTC.from_pretrained(folder / "model").config.vocab_size == len(tokenizer)


def student(folder, output, *more):
    """Words of a run in which a model labels dev and test and learns from its labels."""
    words = "--unlabelled_split dev+test --eval_splits dev --generations 1 --ema_decay 0"
    words += " --per_device_train_batch_seconds 24 --max_train_steps 2 --encoder_learning_rate 0"
    model = folder / "model"
    places = {"data_dir": folder, "teacher": model, "model_name_or_path": model, "output_dir": output}
    return [*words.split(), *options(places), *more]


@needs_search
def test_a_model_labels_speech_with_words_and_learns_from_them(place, tmp_path):
    """The labels are what `transcribe` finds, and the student is a model of the same phonemes."""
    folder, _ = place
    search = {"language_model": str(folder / "lm.arpa"), "lm_weight": 1.0, "word_score": 2.0}
    options = [word for name, value in search.items() for word in (f"--{name}", str(value))]
    (_, generation) = nst.main(student(folder, tmp_path / "nst", *options))["generations"]
    files = [one.audio for one in load_speech(folder, "dev+test")[0]]
    expected = WhisperForCTC.from_pretrained(folder / "model").eval().transcribe(files, **search)
    made = tmp_path / "nst" / "gen_1"
    found = [json.loads(line) for line in (made / "labels" / "labels.part-0.jsonl").read_text().splitlines()[1:]]
    texts = {label["audio"]: label["text"] for label in found}
    assert texts == {str(file): one.text for file, one in zip(files, expected, strict=True)}
    kept = [json.loads(line)["text"] for line in (made / "pseudo_labels.jsonl").read_text().splitlines()]
    assert sorted(kept) == sorted(filter(None, texts.values())) != []
    assert generation["utterances"]["train"] == 10 + len(kept)
    assert (made / "lexicon.txt").read_text() == (folder / "model" / "lexicon.txt").read_text()


def test_a_teacher_of_phonemes_needs_a_language_model(place, tmp_path):
    with pytest.raises(ValueError, match=r"model are phonemes: add --language_model"):
        nst.main(student(place[0], tmp_path / "nst"))


def test_the_evaluation_looks_words_up(place, tmp_path):
    folder, results = place
    words = ["--model_name_or_path", str(folder / "model"), "--data_dir", str(folder), "--eval_splits", "dev"]
    assert evaluation.main([*words, "--output_dir", str(tmp_path), "--device", "cpu"]) == 0
    found = json.loads((tmp_path / "asr.json").read_text())["splits"]["dev"]["searches"]["greedy"]
    assert found["wer"] == pytest.approx(results["metrics"]["dev_wer"])


@needs_search
def test_words_are_found_by_their_pronunciation(place, tmp_path):
    folder, _ = place
    words = ["--model_name_or_path", str(folder / "model"), "--data_dir", str(folder), "--eval_splits", "dev"]
    words += ["--language_model", str(folder / "lm.arpa"), "--lexicon", str(folder / "lexicon.txt")]
    assert evaluation.main([*words, "--output_dir", str(tmp_path), "--device", "cpu"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert {word for row in rows for word in row["beam 200, language model"].split()} <= set(WORDS)
    options = ["--lm_weights", "0.5", "--word_scores", "0", "1", "--beam_size", "9", "--choose_beam_size", "9"]
    options += ["--language_model", str(folder / "lm.arpa"), "--whisper", str(folder / "whisper")]
    options += ["--rescored_texts", "4"]
    call = [str(folder / "model"), "--data_dir", str(folder), "--output_dir", str(tmp_path), *options]
    assert whisper_ctc.main(call) == 0
    content = json.loads((tmp_path / "whisper_ctc.json").read_text())
    for row in content["rows"]:
        assert row["wer"] == word_errors([one.text for one in load_speech(folder, row["split"])[0]], row["texts"]).rate
        if row["search"] != "greedy":
            assert {word for text in row["texts"] for word in text.split()} <= set(WORDS)


@needs_search
def test_streams_and_long_recordings_have_words(place, tmp_path, monkeypatch):
    """A window that holds all of a recording finds the words of `transcribe`, with their times; so does the program."""
    folder, _ = place
    model = WhisperForCTC.from_pretrained(folder / "model").eval()
    processor = ConformerProcessor.from_pretrained(folder / "model")
    utterance = load_speech(folder, "dev")[0][0]
    audio = torch.from_numpy(read_audio(utterance, 16000))
    lexicon = WordLexicon(processor.tokenizer, folder / "lm.arpa", 0.7, 0.0, Pronunciations(folder / "lexicon.txt"))
    for scorer, weights in ((None, {}), (lexicon, {"language_model": folder / "lm.arpa", "lm_weight": 0.7})):
        options = {**weights, "word_score": 0.0} if weights else {}
        (expected,) = model.transcribe([audio], return_timestamps="word", **options)
        stream = model.stream(processor, step=5.0, look_ahead=1.0, context=0.0, scorer=scorer)
        stream.feed(audio)
        stream.finish()
        assert stream.text == expected.text
        assert [word.text for word in stream.words] == expected.text.split() == [one.text for one in expected.spans]
        assert [(one.start, one.end) for one in stream.words] == [(one.start, one.end) for one in expected.spans]
    words = [str(folder / "model"), "--data_dir", str(folder), "--split", "dev", "--minutes", "0.04", "--context", "1"]
    words += ["--language_model", str(folder / "lm.arpa")]
    monkeypatch.setattr(whisper_ctc_long, "isolated", isolated_here)
    assert whisper_ctc_long.main([*words, "--output_dir", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "whisper_ctc_long.json").read_text())
    texts = {cell["way"]: cell["text"] for cell in content["cells"]}
    assert texts["windows"] == texts["one pass, exact"]
    assert {word for text in texts.values() for word in text.split()} <= set(WORDS)
    assert content["facts"].startswith("Search among the words of lm.arpa, lm_weight 0.7, word_score 0")


def test_missing_words(place):
    folder, _ = place
    spoken = Pronunciations(folder / "lexicon.txt")
    utterances = [Utterance(name, text, b"") for name, text in (("a", "BAD CAB"), ("b", "BAD DOG CAT"), ("c", "DOG"))]
    with pytest.raises(ValueError, match=r"lacks 2 words of the transcripts: DOG, CAT\. .* with --max_bad"):
        as_phonemes(utterances, spoken, Skipped())
    skipped = Skipped(2)
    assert [one.text for one in as_phonemes(utterances, spoken, skipped)] == ["BH-AH-DH CH-AH-BH"]
    assert skipped.reasons["b"] == "has words that the lexicon lacks: DOG, CAT"
    with pytest.raises(ValueError, match="lacks: DOG"):
        as_phonemes(utterances, spoken, Skipped(1))
    with pytest.raises(ValueError, match="of 3 utterances 2 cannot be used"):
        as_phonemes(utterances, spoken, Skipped(0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lexicon", "none.txt"], "lexicon must be a text in UTF-8"),
        (["--lexicon", "lexicon.txt", "--tokenizer_type", "char"], "with lexicon the tokens are its phonemes"),
        (["--lexicon", "lexicon.txt", "--architecture", "whisper"], "lexicon is for --architecture ctc"),
        (["--lexicon", "other.txt", "--model_name_or_path", "model"], "no word whose phonemes are tokens of the model"),
    ],
)
def test_what_is_refused(place, tmp_path, monkeypatch, options, message):
    folder, _ = place
    monkeypatch.chdir(folder)
    (folder / "other.txt").write_text("".join(f"{word}\tX\n" for word in WORDS))
    words = ["--data_dir", ".", "--model_name_or_path", "whisper", "--architecture", "ctc", "--max_train_steps", "1"]
    words += ["--encoder_learning_rate", "0", "--output_dir", str(tmp_path / "run"), *options]
    with pytest.raises(ValueError, match=message):
        asr.main(words)
