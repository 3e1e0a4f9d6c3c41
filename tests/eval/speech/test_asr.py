"""Error rates of saved speech models: hypotheses against a search by hand, counts against jiwer, errors by name."""

import itertools
import json
import time

import jiwer
import pytest
import soundfile
import torch
from tiny_speech import SPLITS, save_model, write_corpus

import favor
from favor.eval import asr
from favor.models.conformer import ConformerForCTC, ConformerForTransducer
from favor.models.speech import (
    ConformerProcessor,
    WordLexicon,
    WordScorer,
    ctc_lexicon_beam,
    ctc_word_beam,
    transducer_beam,
    write_arpa,
)
from favor.train.speech.batches import SpeechDataset


@pytest.fixture(scope="module")
def transducer(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("transducer"), "transducer", ctc_weight=0.3)


def call(model, corpus, output, *flags, splits=("dev",)):
    """Runs the program; returns its JSON and the rows of each split."""
    words = ["--model_name_or_path", str(model), "--data_dir", str(corpus), "--eval_splits", *splits]
    assert asr.main([*words, "--output_dir", str(output), "--device", "cpu", *flags]) == 0
    rows = {split: [*map(json.loads, (output / f"{split}.jsonl").read_text().splitlines())] for split in splits}
    return json.loads((output / "asr.json").read_text()), rows


def features(folder, corpus, name):
    """Inputs of one utterance, without padding."""
    processor = ConformerProcessor.from_pretrained(folder)
    samples, rate = soundfile.read(corpus / f"{name}.wav", dtype="float32")
    return processor, processor(samples, sampling_rate=rate)["input_features"]


@torch.no_grad()
def by_hand(folder, corpus, name, model):
    """Greedy CTC: the most probable token of each frame, repetitions and blanks taken out."""
    processor, inputs = features(folder, corpus, name)
    best = model(inputs).logits[0].argmax(-1).tolist()
    return processor.tokenizer.decode([token for token, _ in itertools.groupby(best) if token], group_tokens=False)


def test_greedy_ctc_of_two_splits(ctc, corpus, tmp_path):
    content, rows = call(ctc, corpus, tmp_path, splits=("dev", "test"))
    model = ConformerForCTC.from_pretrained(ctc).eval()
    for split, found in rows.items():
        assert [row["id"] for row in found] == [f"{split}{number}" for number in range(len(SPLITS[split]))]
        assert [row["greedy"] for row in found] == [by_hand(ctc, corpus, row["id"], model) for row in found]
        assert any(row["greedy"] for row in found)
        references, hypotheses = [row["reference"] for row in found], [row["greedy"] for row in found]
        result, words = content["splits"][split], jiwer.process_words(references, hypotheses)
        greedy, characters = result["searches"]["greedy"], jiwer.process_characters(references, hypotheses)
        assert greedy["wer"] == pytest.approx(100 * words.wer)
        assert greedy["cer"] == pytest.approx(100 * characters.cer)
        for unit, expected in (("words", words), ("characters", characters)):
            for kind in ("hits", "substitutions", "deletions", "insertions"):
                assert greedy[unit][kind] == getattr(expected, kind)
        assert result["audio_hours"] == pytest.approx(sum(SPLITS[split]) / 3600)
        assert greedy["real_time_factor"] == pytest.approx(greedy["seconds"] / sum(SPLITS[split]))
    assert (content["architecture"], content["attn_implementation"]) == ("ConformerForCTC", "sdpa")
    assert str(corpus.parent) not in (tmp_path / "asr.json").read_text()


def test_beam_search_of_a_transducer(transducer, corpus, tmp_path):
    words = ("--beam_size", "3", "--per_device_eval_batch_seconds", "1")
    content, rows = call(transducer, corpus, tmp_path, *words, splits=("test",))
    assert content["architecture"] == "ConformerForTransducer"
    assert list(content["splits"]["test"]["searches"]) == ["greedy", "beam 3"]
    model = ConformerForTransducer.from_pretrained(transducer).eval()
    assert model.ctc_head is not None
    for row in rows["test"]:
        processor, inputs = features(transducer, corpus, row["id"])
        ids = model.generate(inputs)[0].tolist()
        assert row["greedy"] == processor.tokenizer.decode([token for token in ids if token], group_tokens=False)
        with torch.no_grad():
            best = transducer_beam(model, *model.encode(inputs), beam_size=3)[0][0]
        assert row["beam 3"] == processor.tokenizer.decode(list(best.tokens), group_tokens=False)
    words = (tmp_path / "asr.md").read_text()
    assert words.count("| test | greedy |") == words.count("| test | beam 3 |") == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_language_model_with_hotwords_or_known_words(ctc, corpus, tmp_path, known):
    pytest.importorskip("flashlight.lib.text.decoder", reason="needs flashlight-text, of the extra lm")
    path = write_arpa(["GO FIN", "HER EAR", "A BAT GO"], tmp_path / "lm.arpa", 2)
    words = ["--language_model", str(path), "--lm_weight", "0.2", "--word_score", "2"]
    hotwords = ["--beam_size", "10", "--hotwords", "COT", "DO A", "--hotword_weight", "3"]
    words += ["--known_words"] if known else hotwords
    content, rows = call(ctc, corpus, tmp_path / "out", *words)
    name = "beam 200, language model, known words" if known else "beam 10, language model, hotwords"
    assert list(content["splits"]["dev"]["searches"]) == ["greedy", name]
    model = ConformerForCTC.from_pretrained(ctc).eval()
    for row in rows["dev"]:
        processor, inputs = features(ctc, corpus, row["id"])
        with torch.no_grad():
            logits = model(inputs).logits
        if known:
            scorer = WordLexicon(processor.tokenizer, path, 0.2, 2.0)
            best = ctc_lexicon_beam(logits, [logits.shape[1]], scorer)[0][0].tokens
            assert set(row[name].split()) <= {"GO", "FIN", "HER", "EAR", "A", "BAT"}
        else:
            scorer = WordScorer(processor.tokenizer, path, 0.2, 2.0, ["COT", "DO A"], 3.0)
            best = ctc_word_beam(logits, [logits.shape[1]], scorer, 10)[0][0].tokens
        assert row[name] == processor.tokenizer.decode(best, group_tokens=False)
    assert any(row[name] not in ("", row["greedy"]) for row in rows["dev"])


def test_some_utterances_are_spread_over_the_split(ctc, corpus, tmp_path):
    """Sorted by speaker, the first ones are those of one speaker."""
    content, rows = call(ctc, corpus, tmp_path, "--max_eval_samples", "2", splits=("train", "dev"))
    assert [row["id"] for row in rows["train"]] == ["train1", "train3"]
    assert [row["id"] for row in rows["dev"]] == ["dev0", "dev2"]
    assert content["splits"]["train"]["utterances"] == 2
    for number in (3, 4, None):
        assert asr.evenly_spaced(["a", "b", "c"], number) == ["a", "b", "c"]
    speakers = [speaker for speaker in range(40) for _ in range(70)]
    assert asr.evenly_spaced(speakers, 40) == list(range(40))


def test_another_backend(ctc, corpus, tmp_path):
    options = ("--attn_implementation", "favor++", "--num_features", "4", "--exact_below", "0", "--seed", "5")
    content, rows = call(ctc, corpus, tmp_path, *options)
    assert (content["attn_implementation"], content["favor"]["num_features"]) == ("favor++", 4)
    model = ConformerForCTC.from_pretrained(ctc).eval()
    exact = [by_hand(ctc, corpus, row["id"], model) for row in rows["dev"]]
    favor.configure(model, "favor++", num_features=4, exact_below=0, seed=5)
    found = [row["greedy"] for row in rows["dev"]]
    assert found == [by_hand(ctc, corpus, row["id"], model) for row in rows["dev"]]
    assert found != exact
    # A model that was saved with a backend keeps it and its seed.
    model.save_pretrained(tmp_path / "saved")
    ConformerProcessor.from_pretrained(ctc).save_pretrained(tmp_path / "saved")
    content, rows = call(tmp_path / "saved", corpus, tmp_path / "again")
    assert (content["attn_implementation"], content["favor"]["seed"]) == ("favor++", 5)
    assert [row["greedy"] for row in rows["dev"]] == found


def test_seconds_include_what_comes_before_the_model(ctc, corpus, tmp_path, monkeypatch):
    original = SpeechDataset.__getitem__
    monkeypatch.setattr(SpeechDataset, "__getitem__", lambda self, key: (time.sleep(0.1), original(self, key))[1])
    content, _ = call(ctc, corpus, tmp_path)
    assert content["splits"]["dev"]["searches"]["greedy"]["seconds"] > 0.3


def test_unusable_utterances(ctc, tmp_path):
    corpus = write_corpus(tmp_path)
    (corpus / "dev0.wav").write_bytes(b"no audio")
    soundfile.write(corpus / "dev2.wav", torch.zeros(2000).numpy(), 16000)
    with pytest.raises(ValueError, match=r"dev0 .*cannot be decoded"):
        call(ctc, corpus, tmp_path / "none")
    with pytest.raises(ValueError, match=r"dev2 .*11 feature frames, too few"):
        call(ctc, corpus, tmp_path / "one", "--max_bad", "1")
    content, rows = call(ctc, corpus, tmp_path / "two", "--max_bad", "2")
    skipped = content["splits"]["dev"]["skipped"]
    assert [name.split()[0] for name in skipped] == ["dev0", "dev2"]
    assert [row["id"] for row in rows["dev"]] == ["dev1"]
    assert "dev: dev2" in (tmp_path / "two" / "asr.md").read_text()


def test_user_errors(ctc, transducer, corpus, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "conformer"}')
    for model, output, words, message in (
        (tmp_path / "nothing", tmp_path, (), "there is no such folder here"),
        (tmp_path, tmp_path, (), "must hold a ConformerForCTC or a ConformerForTransducer"),
        (ctc, tmp_path, ("--num_features", "8"), "num_features: options of FAVOR attention, not of sdpa"),
        (ctc, corpus, (), "output_dir must not be data_dir"),
        (ctc, tmp_path, ("--beam_size", "0"), "beam_size must be greater than 0"),
        (transducer, tmp_path, ("--language_model", "lm.arpa"), "language_model needs a ConformerForCTC, got a Conf"),
        (ctc, tmp_path, ("--lm_weight", "1", "--beam_size", "4"), "lm_weight needs language_model"),
        (ctc, tmp_path, ("--known_words",), "known_words needs language_model"),
    ):
        with pytest.raises(ValueError, match=message):
            call(model, corpus, output, *words)
    with pytest.raises(ValueError, match="splits must be different"):
        call(ctc, corpus, tmp_path, splits=("dev", "dev"))
