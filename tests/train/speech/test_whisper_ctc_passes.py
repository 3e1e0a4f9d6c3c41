"""CTC on Whisper's encoder, pass by pass, of one model or the mean of several, and with phonemes as tokens."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from launching import caller, isolated_here, options
from speech_corpus import HEAD, SPECIAL, WORDS, make_processor, save, save_causal, write_corpus
from tiny_speech import needs_search

from favor.eval import asr as evaluation
from favor.eval import whisper_ctc, whisper_ctc_long
from favor.eval.language.models import load as load_language_model
from favor.eval.speech import scores as scoring
from favor.eval.speech.scores import check_alike, frame_scores, language_scores, rescored, text_scores, texts_before
from favor.eval.whisper import load
from favor.eval.whisper_ctc_long import WAYS
from favor.models.speech import ConformerProcessor, Pronunciations, WordLexicon, ctc_greedy, train_tokenizer, write_arpa
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
from favor.train import asr, nst
from favor.train.common.arguments import BackendArguments
from favor.train.speech.data import Skipped, Utterance, read_audio
from favor.train.speech.model import as_phonemes
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors

SIZES = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "head_layers": 1}


def save_ctc(folder, tokenizer=None, seed=0, **changes):
    """Saves an untrained model whose outputs vary."""
    torch.manual_seed(seed)
    processor = ConformerProcessor(WhisperCTCFeatureExtractor(), tokenizer or train_tokenizer(WORDS, "char"))
    model = WhisperForCTC(WhisperCTCConfig(**SIZES, vocab_size=len(processor.tokenizer), **changes))
    torch.nn.init.normal_(model.ctc_head.out.weight)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a language model, a Whisper, a model that was trained for a few steps, and two untrained ones."""
    place = tmp_path_factory.mktemp("place")
    write_corpus(place, {"train": 10, "dev": 3, "test": 3})
    save(place / "whisper", make_processor())
    write_arpa([" ".join(WORDS), "BAD CAB"], place / "lm.arpa", order=2)
    given = HEAD | {"data_dir": place, "model_name_or_path": place / "whisper", "learning_rate": 1e-3}
    caller(asr.main, place, given)("model", max_train_steps=12, ema_decay=0)
    for seed, name in enumerate("ab"):
        save_ctc(place / name, seed=seed)
    return place


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """The folder of a causal language model."""
    folder = tmp_path_factory.mktemp("causal") / "llama"
    save_causal(folder)
    return folder


def call(place, *words, folders=("model",)):
    folders = [str(place / folder) for folder in folders]
    assert whisper_ctc.main([*folders, "--data_dir", str(place), "--output_dir", str(place), *words]) == 0
    return json.loads((place / "whisper_ctc.json").read_text())


@needs_search
def test_all_passes(place, causal):
    options = "--lm_weights 0 1 --word_scores 1 --beam_size 6 --choose_beam_size 4 --rescored_texts 3"
    options += " --max_eval_samples 2 --causal_weights 0 1 --context_texts 2 --ngram_weights 0 1 --whisper_weights 0 1"
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
def test_a_causal_model_reads_what_was_said_before(causal, monkeypatch, at_once):
    monkeypatch.setattr(scoring, "TEXTS", at_once)
    model, tokenizer = load_language_model(str(causal))
    texts = [[("BAD CAB", -1.0), ("FACE", -2.0)], [("Ace", -1.0)]]
    found = language_scores(model, tokenizer, texts, [["A BED", "DAD"], []])
    ids = tokenizer("a bed\n").input_ids + tokenizer("dad\n").input_ids
    for text, said, score in zip(["bad cab", "face", "Ace"], [ids, ids, []], [*found[0], *found[1]], strict=True):
        own = tokenizer(text + "\n").input_ids
        row = torch.tensor([[tokenizer.eos_token_id, *said, *own]])
        with torch.no_grad():
            log_probs = model(input_ids=row).logits[0, :-1].log_softmax(-1)
        true = log_probs.gather(-1, row[0, 1:, None])[-len(own) :].sum()
        assert score == pytest.approx(float(true), rel=1e-4)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="bos_token or an eos_token"):
        language_scores(model, tokenizer, [[("A", 0.0)]])


def test_texts_before_are_those_of_the_chapter():
    def at(speaker, chapter):
        return Utterance("id", "A", Path("a.wav"), speaker=speaker, chapter=chapter)

    utterances = [at("1", "1"), at("1", "1"), at("2", "1"), at("1", "1"), at(None, None), at(None, None)]
    texts = ["A", "B", "C", "D", "E", "F"]
    assert texts_before(utterances, texts, 1) == [[], ["A"], [], ["B"], [], []]
    assert texts_before(utterances, texts, 9) == [[], ["A"], [], ["A", "B"], [], []]
    assert texts_before(utterances, texts, 0) == [[]] * 6


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
        sizes = (torch.tensor(30), torch.tensor(len(labels)))
        loss = torch.nn.functional.ctc_loss(logits, labels, *sizes, reduction="sum")
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


def log_probs(folder, utterance):
    """Log probabilities of one model alone, in float64."""
    model = WhisperForCTC.from_pretrained(folder).double().eval()
    features = ConformerProcessor.from_pretrained(folder)(read_audio(utterance), sampling_rate=16000).input_features
    with torch.no_grad():
        logits = model(features.double()).logits[0]
    return logits - logits.exp().sum(-1, keepdim=True).log()


def test_the_mean_of_two_models(place):
    """The scores are the mean of log probabilities, neither that of probabilities nor those of one model."""
    utterances = load_speech(place, "dev")[0]
    folders = [str(place / name) for name in "ab"]
    scores, facts = frame_scores(folders, {"dev": utterances})
    texts = {row["split"]: row["texts"] for row in call(place, folders="ab")["rows"]}["dev"]
    tokenizer = ConformerProcessor.from_pretrained(folders[0]).tokenizer
    for utterance, found, text in zip(utterances, scores["dev"], texts, strict=True):
        first, second = (log_probs(folder, utterance) for folder in folders)
        torch.testing.assert_close(found.double(), (first + second) / 2, atol=1e-4, rtol=0)
        assert found.dtype == torch.float32
        others = (first, second, ((first.exp() + second.exp()) / 2).log())
        assert min(float((found - other).abs().max()) for other in others) > 0.1
        tokens = ctc_greedy(((first + second) / 2)[None], [len(first)])[0]
        assert text == tokenizer.decode(tokens, group_tokens=False)
    parameters = WhisperForCTC.from_pretrained(folders[0]).num_parameters()
    assert facts == [{"kind": "WhisperForCTC", "parameters": parameters, "attention": "sdpa"}] * 2
    # One model keeps its logits.
    found, inputs = frame_scores(folders[:1], {"dev": utterances[-1:]})[0]["dev"][0], read_audio(utterances[-1])
    inputs = ConformerProcessor.from_pretrained(folders[0])(inputs, sampling_rate=16000)
    with torch.no_grad():
        torch.testing.assert_close(found, WhisperForCTC.from_pretrained(folders[0]).eval()(**inputs).logits[0])


@needs_search
def test_a_folder_twice_is_the_folder(place):
    """Both searches find the same; two different models find other texts."""
    options = ["--language_model", str(place / "lm.arpa"), "--lm_weights", "0.5", "1", "--word_scores", "1"]
    options += ["--beam_size", "50", "--choose_beam_size", "50"]  # with a weight of 0 some hypotheses are equally good
    once, twice, both = (call(place, *options, folders=own) for own in ("a", "aa", "ab"))
    for name in ("rows", "chosen", "utterances", "times"):
        assert twice[name] == once[name]
    assert [row["texts"] for row in both["rows"]] != [row["texts"] for row in once["rows"]]


def test_the_report_names_all_models(place):
    content = call(place, folders="ab")
    parameters = sum(WhisperForCTC.from_pretrained(place / name).num_parameters() for name in "ab")
    text = (place / "whisper_ctc.md").read_text()
    assert text.startswith("# a, b\n")
    start = f"Mean of the log probabilities of 2 models: WhisperForCTC, {parameters:,} parameters together, attention"
    assert content["facts"].startswith(start)
    assert "python -m favor.eval.whisper_ctc a b --data_dir DATA" in text
    assert str(place) not in text
    content, text = call(place, folders="a"), (place / "whisper_ctc.md").read_text()
    assert content["facts"].startswith(f"WhisperForCTC, {parameters // 2:,} parameters, attention sdpa; ")
    assert text.startswith("# a\n")


def test_one_model_is_in_memory_at_a_time(place, monkeypatch):
    loaded, load_one = [], evaluation.load

    def watched(*arguments):
        assert all(model() is None for model in loaded)
        model, processor = load_one(*arguments)
        loaded.append(weakref.ref(model))
        return model, processor

    monkeypatch.setattr(evaluation, "load", watched)
    frame_scores([str(place / name) for name in "aba"], {"dev": load_speech(place, "dev")[0]})
    assert len(loaded) == 3


def test_models_that_have_no_mean(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    for letters, changes, differs in (
        (["FFFFFF EEEEE DDDD CCC BB A"], {}, "tokens"),  # another order
        (["AB"], {}, "tokens"),
        (WORDS, {"pad_token_id": 1}, "tokens"),
        (WORDS, {"feature_hop_length": 80}, "frames"),
    ):
        save_ctc(place / "other", train_tokenizer(letters, "char"), **changes)
        with pytest.raises(ValueError, match=f"but other has other {differs} than a. Leave one"):
            whisper_ctc.main(["a", "a", "other", "--data_dir", str(place), "--output_dir", str(tmp_path)])


def test_pronunciations_must_be_equal(tmp_path):
    """Those of an option are for all models."""

    def saved(name, bad):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lexicon.txt").write_text(f"ACE\tA S\nBAD\t{bad}\n")
        return save_ctc(tmp_path / name, Pronunciations(tmp_path / name / "lexicon.txt").tokenizer())

    first, equal, other = saved("first", "B A D"), saved("equal", "B A D"), saved("other", "B D A")
    check_alike([first, equal], None)
    with pytest.raises(ValueError, match=r"other has other pronunciations than .*first\. .*--lexicon"):
        check_alike([first, equal, other], None)
    check_alike([first, other], tmp_path / "first" / "lexicon.txt")
    (tmp_path / "other" / "lexicon.txt").unlink()
    with pytest.raises(ValueError, match="other pronunciations"):
        check_alike([first, other], None)


def lines(words):
    """Each letter is a phoneme of its own."""
    return "".join(f"{word}\t{' '.join(f'{letter}H' for letter in word)}\n" for word in words)


@pytest.fixture(scope="module")
def phonemes(tmp_path_factory):
    """A corpus, a lexicon, a Whisper, and a model of two stages."""
    place = tmp_path_factory.mktemp("place")
    write_corpus(place, {"train": 10, "dev": 3, "test": 3})
    save(place / "whisper", make_processor())
    (place / "lexicon.txt").write_text(lines(WORDS) + "BAD\tBH DH\n")
    write_arpa([" ".join(WORDS), "BAD CAB"], place / "lm.arpa", order=2, words=["UNSAID"])
    run = caller(asr.main, place, {"data_dir": place, "per_device_train_batch_seconds": 24, "ema_decay": 0})
    first = {"architecture": "ctc", "lexicon": place / "lexicon.txt", "encoder_learning_rate": 0}
    run("head", model_name_or_path=place / "whisper", max_train_steps=2, **first)
    second = {"max_train_steps": 10, "encoder_learning_rate": 4e-4}
    return place, run("model", model_name_or_path=place / "head", **second)


def student(folder, output, *more):
    """Words of a run in which a model labels dev and test and learns from its labels."""
    words = "--unlabelled_split dev+test --eval_splits dev --generations 1 --ema_decay 0"
    words += " --per_device_train_batch_seconds 24 --max_train_steps 2 --encoder_learning_rate 0"
    model = folder / "model"
    places = {"data_dir": folder, "output_dir": output, "teacher": model, "model_name_or_path": model}
    return [*words.split(), *options(places), *more]


def test_both_stages_have_phonemes_and_a_teacher_of_them_needs_a_language_model(phonemes, tmp_path):
    folder, _ = phonemes
    spoken = Pronunciations(folder / "lexicon.txt")
    assert Pronunciations(folder / "model/lexicon.txt").spoken == spoken.spoken
    tokenizer = ConformerProcessor.from_pretrained(folder / "model").tokenizer
    assert set(tokenizer.get_vocab()) == {"<pad>", "</s>", "<unk>", "▁", *(f"{one}H" for one in "ABCDEF")}
    assert WhisperForCTC.from_pretrained(folder / "model").config.vocab_size == len(tokenizer)
    with pytest.raises(ValueError, match=r"model are phonemes: add --language_model"):
        nst.main(student(folder, tmp_path / "nst"))


@needs_search
def test_a_model_labels_speech_with_words_and_learns_from_them(phonemes, tmp_path):
    """The labels are what `transcribe` finds, and the student is a model of the same phonemes."""
    folder, _ = phonemes
    search = {"language_model": str(folder / "lm.arpa"), "lm_weight": 1.0, "word_score": 2.0}
    (_, generation) = nst.main(student(folder, tmp_path / "nst", *options(search)))["generations"]
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


@needs_search
def test_the_evaluation_looks_words_up_and_finds_them_by_their_pronunciation(phonemes, tmp_path):
    folder, results = phonemes
    given = {"model_name_or_path": folder / "model", "data_dir": folder, "eval_splits": "dev", "device": "cpu"}
    given |= {"language_model": folder / "lm.arpa", "lexicon": folder / "lexicon.txt", "output_dir": tmp_path}
    assert evaluation.main(options(given)) == 0
    found = json.loads((tmp_path / "asr.json").read_text())["splits"]["dev"]["searches"]["greedy"]
    assert found["wer"] == pytest.approx(results["metrics"]["dev_wer"])
    rows = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    assert {word for row in rows for word in row["beam 200, language model"].split()} <= set(WORDS)
    given = {"lm_weights": 0.5, "word_scores": "0 1", "beam_size": 9, "choose_beam_size": 9, "rescored_texts": 4}
    given |= {"language_model": folder / "lm.arpa", "whisper": folder / "whisper", "data_dir": folder}
    assert whisper_ctc.main([str(folder / "model"), *options(given | {"output_dir": tmp_path})]) == 0
    content = json.loads((tmp_path / "whisper_ctc.json").read_text())
    for row in content["rows"]:
        assert row["wer"] == word_errors([one.text for one in load_speech(folder, row["split"])[0]], row["texts"]).rate
        if row["search"] != "greedy":
            assert {word for text in row["texts"] for word in text.split()} <= set(WORDS)


@needs_search
def test_streams_and_long_recordings_have_words(phonemes, tmp_path, monkeypatch):
    """A window that holds all of a recording finds the words of `transcribe`, with their times; so does the program."""
    folder, _ = phonemes
    model = WhisperForCTC.from_pretrained(folder / "model").eval()
    processor = ConformerProcessor.from_pretrained(folder / "model")
    utterance = load_speech(folder, "dev")[0][0]
    audio = torch.from_numpy(read_audio(utterance, 16000))
    lexicon = WordLexicon(processor.tokenizer, folder / "lm.arpa", 0.7, 0.0, Pronunciations(folder / "lexicon.txt"))
    for scorer, weights in ((None, {}), (lexicon, {"language_model": folder / "lm.arpa", "lm_weight": 0.7})):
        scores = {"word_score": 0.0} if weights else {}
        (expected,) = model.transcribe([audio], return_timestamps="word", **weights, **scores)
        stream = model.stream(processor, step=5.0, look_ahead=1.0, context=0.0, scorer=scorer)
        stream.feed(audio)
        stream.finish()
        assert stream.text == expected.text
        assert [word.text for word in stream.words] == expected.text.split() == [one.text for one in expected.spans]
        assert [(one.start, one.end) for one in stream.words] == [(one.start, one.end) for one in expected.spans]
    given = {"data_dir": folder, "split": "dev", "minutes": 0.04, "context": 1, "output_dir": tmp_path}
    monkeypatch.setattr(whisper_ctc_long, "isolated", isolated_here)
    given["language_model"] = folder / "lm.arpa"
    assert whisper_ctc_long.main([str(folder / "model"), *options(given)]) == 0
    content = json.loads((tmp_path / "whisper_ctc_long.json").read_text())
    texts = {cell["way"]: cell["text"] for cell in content["cells"]}
    assert texts["windows"] == texts["one pass, exact"]
    assert {word for text in texts.values() for word in text.split()} <= set(WORDS)
    assert content["facts"].startswith("Search among the words of lm.arpa, lm_weight 0.7, word_score 0")


def test_missing_words(phonemes):
    folder, _ = phonemes
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


def test_what_is_refused(phonemes, tmp_path, monkeypatch):
    folder, _ = phonemes
    monkeypatch.chdir(folder)
    (folder / "other.txt").write_text("".join(f"{word}\tX\n" for word in WORDS))
    given = {"data_dir": ".", "model_name_or_path": "whisper", "architecture": "ctc", "max_train_steps": 1}
    given |= {"encoder_learning_rate": 0, "output_dir": tmp_path / "run"}
    for more, message in (
        (["--lexicon", "none.txt"], "lexicon must be a text in UTF-8"),
        (["--lexicon", "lexicon.txt", "--tokenizer_type", "char"], "with lexicon the tokens are its phonemes"),
        (["--lexicon", "lexicon.txt", "--architecture", "whisper"], "lexicon is for --architecture ctc"),
        (["--lexicon", "other.txt", "--model_name_or_path", "model"], "no word whose phonemes are tokens of the model"),
    ):
        with pytest.raises(ValueError, match=message):
            asr.main([*options(given), *more])
