"""Error rates of saved speech models against a search by hand and jiwer; lexicons and language models, by hand."""

import itertools
import json
import lzma
import sys
import time

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import SPLITS, save_model, write_corpus

import favor
from favor.eval import asr
from favor.eval.speech import language_model, lexicon
from favor.models import speech
from favor.models.conformer import ConformerForCTC, ConformerForTransducer
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
    processor = speech.ConformerProcessor.from_pretrained(folder)
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
            best = speech.transducer_beam(model, *model.encode(inputs), beam_size=3)[0][0]
        assert row["beam 3"] == processor.tokenizer.decode(list(best.tokens), group_tokens=False)
    words = (tmp_path / "asr.md").read_text()
    assert words.count("| test | greedy |") == words.count("| test | beam 3 |") == 1


@pytest.mark.parametrize("known", [False, True])
def test_a_language_model_with_hotwords_or_known_words(ctc, corpus, tmp_path, known):
    pytest.importorskip("flashlight.lib.text.decoder", reason="needs flashlight-text, of the extra lm")
    path = speech.write_arpa(["GO FIN", "HER EAR", "A BAT GO"], tmp_path / "lm.arpa", 2)
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
            scorer = speech.WordLexicon(processor.tokenizer, path, 0.2, 2.0)
            best = speech.ctc_lexicon_beam(logits, [logits.shape[1]], scorer)[0][0].tokens
            assert set(row[name].split()) <= {"GO", "FIN", "HER", "EAR", "A", "BAT"}
        else:
            scorer = speech.WordScorer(processor.tokenizer, path, 0.2, 2.0, ["COT", "DO A"], 3.0)
            best = speech.ctc_word_beam(logits, [logits.shape[1]], scorer, 10)[0][0].tokens
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
    speech.ConformerProcessor.from_pretrained(ctc).save_pretrained(tmp_path / "saved")
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


DICTIONARY = """good G UH1 D
day D EY1 # a comment
a.m. EY2 EH1 M
read R IY1 D
read(2) R EH1 D
read(3) R IY0 D
rose R OW1 Z
rock R AA1 K
"""
WIDTH = 4
TEXT = "Mr. Grey came in. It was \u201ccold\u201d; very cold!\n\n* * *\n\nGrey left"
SAID = ["MISTER GREY CAME IN", "IT WAS COLD", "VERY COLD", "GREY LEFT"]


@pytest.fixture
def dictionary(tmp_path):
    (tmp_path / "dictionary.txt").write_text(DICTIONARY)
    return ["--dictionary", str(tmp_path / "dictionary.txt"), "--output_file", str(tmp_path / "new/lexicon.txt")]


def network(path):
    """Random weights, with those of the package's names and shapes."""
    generator = np.random.default_rng(0)
    weights = {"enc_emb": (len(lexicon.LETTERS), 3), "dec_emb": (len(lexicon.PHONEMES), 3)}
    for name in ("enc", "dec"):
        weights |= {f"{name}_w_ih": (3 * WIDTH, 3), f"{name}_w_hh": (3 * WIDTH, WIDTH)}
        weights |= {f"{name}_b_ih": (3 * WIDTH,), f"{name}_b_hh": (3 * WIDTH,)}
    weights |= {"fc_w": (len(lexicon.PHONEMES), WIDTH), "fc_b": (len(lexicon.PHONEMES),)}
    np.savez(path, **{name: generator.normal(size=size).astype(np.float32) for name, size in weights.items()})
    return {name: torch.from_numpy(array) for name, array in np.load(path).items()}


def test_the_words_of_a_dictionary_and_of_texts(dictionary, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lexicon.LetterToSound, "installed", classmethod(lambda kind: None))
    (tmp_path / "text.txt").write_text("Good day's read; a rose's rock's. The roses' Zugzwang")
    assert lexicon.main([*dictionary, "--texts", str(tmp_path / "text.txt")]) == 0
    spoken = speech.Pronunciations(tmp_path / "new/lexicon.txt").spoken
    expected = {"GOOD": "G UH D", "DAY": "D EY", "READ": "R IY D, R EH D", "ROSE": "R OW Z", "ROCK": "R AA K"}
    expected |= {"DAY'S": "D EY Z", "ROSE'S": "R OW Z IH Z", "ROCK'S": "R AA K S"}
    assert {word: ", ".join(map(" ".join, own)) for word, own in spoken.items()} == expected
    out = capsys.readouterr().out
    assert "5 words of the dictionary and 3 more" in out
    assert "4 words have no pronunciation, such as A, ROSES', THE, ZUGZWANG" in out


def test_the_network_is_that_of_the_package(tmp_path, monkeypatch, dictionary):
    """Two GRUs, the last state of the first begins the second, and the most probable phoneme goes on."""
    (tmp_path / "g2p_en").mkdir()
    (tmp_path / "g2p_en/__init__.py").write_text("raise ImportError('not imported')")
    weights = network(tmp_path / "g2p_en/checkpoint20.npz")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "g2p_en", raising=False)
    said = lexicon.LetterToSound.installed()
    grus = {}
    for name in ("enc", "dec"):
        grus[name] = torch.nn.GRU(3, WIDTH, batch_first=True)
        kinds = {"weight_ih_l0": "w_ih", "weight_hh_l0": "w_hh", "bias_ih_l0": "b_ih", "bias_hh_l0": "b_hh"}
        grus[name].load_state_dict({own: weights[f"{name}_{other}"] for own, other in kinds.items()})
    letters = [lexicon.LETTERS.index(one) for one in "zugs"] + [lexicon.LETTERS.index("</s>")]
    state, expected = grus["enc"](weights["enc_emb"][letters][None])[1], [lexicon.PHONEMES.index("<s>")]
    for _ in range(20):
        frames, state = grus["dec"](weights["dec_emb"][expected[-1]][None, None], state)
        expected.append(int((frames[0, 0] @ weights["fc_w"].T + weights["fc_b"]).argmax()))
        if lexicon.PHONEMES[expected[-1]] == "</s>":
            break
    names = [lexicon.PHONEMES[one].rstrip("012") for one in expected if lexicon.PHONEMES[one][0] != "<"]
    assert said("ZUG'S").split() == names
    assert len(lexicon.PHONEMES) == 74
    (tmp_path / "text.txt").write_text("zugs")
    lexicon.main([*dictionary, "--texts", str(tmp_path / "text.txt")])
    found = speech.Pronunciations(tmp_path / "new/lexicon.txt").spoken.get("ZUGS", [()])
    assert found == [tuple(names)]


def test_sentences_are_transcripts(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    with lzma.open(tmp_path / "b.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write("Grey came.")
    (tmp_path / "words.txt").write_text("Zebra\nit's\nnew york\ncold\n", encoding="utf-8")
    for order in (2, 3):
        texts = ["--texts", tmp_path / "a.txt", tmp_path / "b.txt.xz", "--output_file", tmp_path / "new/lm.arpa"]
        language_model.main([*map(str, texts), "--order", str(order), "--words", str(tmp_path / "words.txt")])
        words = ["ZEBRA", "IT'S", "NEW", "YORK"]
        expected = speech.write_arpa([*SAID, "GREY CAME"], tmp_path / "expected.arpa", order, words).read_text()
        assert (tmp_path / "new/lm.arpa").read_text() == expected
    assert "5 sentences of 13 words, 9 different ones and 4 more" in capsys.readouterr().out
    language_model.main(["--texts", str(tmp_path / "a.txt"), "--output_file", str(tmp_path / "lm.arpa")])
    assert (tmp_path / "lm.arpa").read_text() == speech.write_arpa(SAID, tmp_path / "expected.arpa", 3).read_text()


def test_what_is_refused(dictionary, tmp_path):
    (tmp_path / "dictionary.txt").write_text("a.m. EY2 EH1 M\ngood\n")
    with pytest.raises(ValueError, match="must have lines of a word and its phonemes"):
        lexicon.main(dictionary)
    (tmp_path / "empty.txt").write_text("1, 2, 3.")
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    for name, order, message in (
        ("empty.txt", 3, "texts must hold at least one word"),
        ("none.txt", 3, r"expected a text file, got .*none\.txt"),
        ("a.txt", 7, "order must be 2 to 6, which KenLM reads, got 7"),
    ):
        words = ["--texts", str(tmp_path / name), "--order", str(order), "--output_file", str(tmp_path / "lm.arpa")]
        with pytest.raises(ValueError, match=message):
            language_model.main(words)
