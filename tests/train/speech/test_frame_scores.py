"""Scores of several CTC models: their mean in float64, refusals, one model at a time, and the report."""

import json
import weakref

import pytest
import torch
from marks import needs_search
from speech import WORDS, write_corpus

from favor.eval import asr, whisper_ctc
from favor.eval.speech.scores import check_alike, frame_scores
from favor.models.speech import ConformerProcessor, Pronunciations, ctc_greedy, train_tokenizer, write_arpa
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
from favor.train.speech.data import read_audio
from favor.train.speech.sources import load_speech

SIZES = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "head_layers": 1}


def save(folder, tokenizer=None, seed=0, **changes):
    """Saves an untrained model whose outputs vary."""
    torch.manual_seed(seed)
    processor = ConformerProcessor(WhisperCTCFeatureExtractor(), tokenizer or train_tokenizer(WORDS, "char"))
    model = WhisperForCTC(WhisperCTCConfig(**SIZES, vocab_size=len(processor.tokenizer), **changes))
    torch.nn.init.normal_(model.ctc_head.out.weight)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def save_spoken(folder, lines, seed=0):
    """Saves a model of phonemes."""
    folder.mkdir()
    (folder / "lexicon.txt").write_text("".join(f"{line}\n" for line in lines))
    return save(folder, Pronunciations(folder / "lexicon.txt").tokenizer(), seed)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, a language model, and two models that differ in their weights."""
    place = tmp_path_factory.mktemp("place")
    write_corpus(place, {"dev": 4, "test": 3})
    write_arpa([" ".join(WORDS), "BAD CAB"], place / "lm.arpa", order=2)
    for seed, name in enumerate("ab"):
        save(place / name, seed=seed)
    return place


def call(place, folders, *words):
    folders = [str(place / folder) for folder in folders]
    assert whisper_ctc.main([*folders, "--data_dir", str(place), "--output_dir", str(place), *words]) == 0
    return json.loads((place / "whisper_ctc.json").read_text())


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
    texts = {row["split"]: row["texts"] for row in call(place, "ab")["rows"]}["dev"]
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


def test_one_model_keeps_its_logits(place):
    (utterance,) = load_speech(place, "dev")[0][:1]
    (found,) = frame_scores([str(place / "a")], {"dev": [utterance]})[0]["dev"]
    model = WhisperForCTC.from_pretrained(place / "a").eval()
    inputs = ConformerProcessor.from_pretrained(place / "a")(read_audio(utterance), sampling_rate=16000)
    with torch.no_grad():
        torch.testing.assert_close(found, model(**inputs).logits[0])


@needs_search
def test_a_folder_twice_is_the_folder(place):
    """Both searches find the same; two different models find other texts."""
    options = ["--language_model", str(place / "lm.arpa"), "--lm_weights", "0.5", "1", "--word_scores", "1"]
    options += ["--beam_size", "50", "--choose_beam_size", "50"]  # with a weight of 0 some hypotheses are equally good
    once, twice, both = (call(place, folders, *options) for folders in ("a", "aa", "ab"))
    for name in ("rows", "chosen", "utterances", "times"):
        assert twice[name] == once[name]
    assert [row["texts"] for row in both["rows"]] != [row["texts"] for row in once["rows"]]


def test_the_report_names_all_models(place):
    content = call(place, "ab")
    parameters = sum(WhisperForCTC.from_pretrained(place / name).num_parameters() for name in "ab")
    text = (place / "whisper_ctc.md").read_text()
    assert text.startswith("# a, b\n")
    start = f"Mean of the log probabilities of 2 models: WhisperForCTC, {parameters:,} parameters together, attention"
    assert content["facts"].startswith(start)
    assert "python -m favor.eval.whisper_ctc a b --data_dir DATA" in text
    assert str(place) not in text
    content, text = call(place, "a"), (place / "whisper_ctc.md").read_text()
    assert content["facts"].startswith(f"WhisperForCTC, {parameters // 2:,} parameters, attention sdpa; ")
    assert text.startswith("# a\n")


def test_one_model_is_in_memory_at_a_time(place, monkeypatch):
    loaded, load = [], asr.load

    def watched(*arguments):
        assert all(model() is None for model in loaded)
        model, processor = load(*arguments)
        loaded.append(weakref.ref(model))
        return model, processor

    monkeypatch.setattr(asr, "load", watched)
    frame_scores([str(place / name) for name in "aba"], {"dev": load_speech(place, "dev")[0]})
    assert len(loaded) == 3


@pytest.mark.parametrize(
    ("letters", "changes", "differs"),
    [
        (["FFFFFF EEEEE DDDD CCC BB A"], {}, "tokens"),  # another order
        (["AB"], {}, "tokens"),
        (WORDS, {"pad_token_id": 1}, "tokens"),
        (WORDS, {"feature_hop_length": 80}, "frames"),
    ],
)
def test_models_that_have_no_mean(place, tmp_path, monkeypatch, letters, changes, differs):
    monkeypatch.chdir(place)
    save(place / "other", train_tokenizer(letters, "char"), **changes)
    with pytest.raises(ValueError, match=f"but other has other {differs} than a. Leave one"):
        whisper_ctc.main(["a", "a", "other", "--data_dir", str(place), "--output_dir", str(tmp_path)])


def test_pronunciations_must_be_equal(tmp_path):
    """Those of an option are for all models."""
    first = save_spoken(tmp_path / "first", ["ACE\tA S", "BAD\tB A D"])
    equal = save_spoken(tmp_path / "equal", ["ACE\tA S", "BAD\tB A D"], seed=1)
    other = save_spoken(tmp_path / "other", ["ACE\tA S", "BAD\tB D A"])
    check_alike([first, equal], None)
    with pytest.raises(ValueError, match=r"other has other pronunciations than .*first\. .*--lexicon"):
        check_alike([first, equal, other], None)
    check_alike([first, other], tmp_path / "first" / "lexicon.txt")
    (tmp_path / "other" / "lexicon.txt").unlink()
    with pytest.raises(ValueError, match="other pronunciations"):
        check_alike([first, other], None)
