"""Pseudo-labels against single searches and plain numpy, labelling that is killed, speech without transcripts."""

import dataclasses
import shutil

import numpy as np
import pytest
from speech_corpus import librispeech, transcript, write_manifest, write_sound
from tiny_speech import make_model

from favor.models.conformer import ConformerFeatureExtractor, ConformerForCTC, ConformerForTransducer
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train.speech import pseudo_labels
from favor.train.speech.data import Skipped, Utterance, check_lengths, read_audio
from favor.train.speech.manifests import read_manifest
from favor.train.speech.pseudo_labels import PseudoLabel, collect, filter_scores, fingerprint, fit_scores, label, select
from favor.train.speech.sources import load_speech
from favor.train.speech.transcribe import search

LENGTHS = (0.9, 0.4, 0.7, 1.1, 0.5, 0.6, 0.8)
BEAM = 3
BATCHES = {"teacher": "t", "beam_size": BEAM, "max_batch_seconds": 2.0}
VARIED = {"initializer_range": 0.3, "dropout": 0.5}


@pytest.fixture(scope="module")
def processor():
    tokenizer = train_tokenizer([transcript(number) for number in range(30)], "char")
    return ConformerProcessor(ConformerFeatureExtractor(feature_size=20), tokenizer)


@pytest.fixture(scope="module")
def model(processor):
    return make_model(ConformerForCTC, processor, **VARIED)


@pytest.fixture
def speech(tmp_path):
    found = []
    for number, seconds in enumerate(LENGTHS):
        path = write_sound(tmp_path / "audio" / f"{number}.wav", seconds, number)
        found.append(Utterance(f"u{number}", transcript(number), path, seconds))
    return found


@pytest.fixture
def labelled(model, processor, speech):
    """Labels everything at once, in batches of two or three."""

    def call(folder, speech=speech, model=model, **options):
        label(model, processor, speech, folder, **BATCHES | options)
        return collect(speech, folder)

    return call


@pytest.mark.parametrize("kind", [ConformerForCTC, ConformerForTransducer])
def test_labels_are_those_of_a_search_of_each_utterance_alone(kind, labelled, processor, speech, tmp_path):
    model = make_model(kind, processor, **VARIED).train()
    labels = labelled(tmp_path / "labels", model=model)
    assert len({one.text for one in labels}) > 1
    for one, utterance in zip(labels, speech, strict=True):
        features = processor(read_audio(utterance), sampling_rate=16000, return_tensors="pt")["input_features"]
        best = search(model.eval(), {"input_features": features}, BEAM)[0][0]
        text = processor.tokenizer.decode(list(best.tokens), group_tokens=False)
        assert (one.id, one.text, one.tokens) == (utterance.id, text, len(best.tokens))
        assert one.log_prob == pytest.approx(best.log_prob, abs=1e-3)
        assert (one.audio, one.seconds) == (str(utterance.audio), utterance.seconds)


def stop_after(monkeypatch, batches):
    """Lets so many batches through and then ends; a list of the number of utterances in each."""
    seen = []

    def searched(model, batch, beam_size, **options):
        if len(seen) == batches:
            raise KeyboardInterrupt
        seen.append(len(batch["input_features"]))
        return search(model, batch, beam_size, **options)

    monkeypatch.setattr(pseudo_labels, "search", searched)
    return seen


@pytest.mark.parametrize(("done", "torn"), [(0, ""), (1, '{"id": "u4", "audio": "/somewh'), (2, "")])
def test_killed_labelling_goes_on_where_it_was(done, torn, labelled, speech, tmp_path, monkeypatch):
    whole = labelled(tmp_path / "whole")
    with monkeypatch.context() as patch:
        first = stop_after(patch, done)
        with pytest.raises(KeyboardInterrupt):
            labelled(tmp_path / "labels")
    assert len(first) == done
    part = tmp_path / "labels" / "labels.part-0.jsonl"
    part.parent.mkdir(exist_ok=True)
    with part.open("a") as stream:
        stream.write(torn)
    with pytest.raises(ValueError, match=f"lacks labels of {len(LENGTHS) - sum(first)} utterances"):
        collect(speech, part.parent)
    second = stop_after(monkeypatch, 100)
    assert labelled(part.parent) == whole
    assert sum(first) + sum(second) == len(LENGTHS)
    assert part.read_bytes() == (tmp_path / "whole" / part.name).read_bytes()
    third = stop_after(monkeypatch, 0)
    assert labelled(part.parent) == whole
    assert third == []


def test_only_whole_batches_with_something_new_are_searched_again(labelled, speech, tmp_path, monkeypatch):
    whole, file = labelled(tmp_path), tmp_path / "labels.part-0.jsonl"
    # The second of the batch of the two longest.
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if '"u0"' not in line))
    seen = stop_after(monkeypatch, 100)
    assert labelled(tmp_path) == whole
    assert seen == [2]
    moved = dataclasses.replace(speech[0], audio=shutil.copy(speech[0].audio, tmp_path / "moved.wav"))
    assert labelled(tmp_path, [moved, *speech[1:]])[0] == dataclasses.replace(whole[0], audio=str(moved.audio))


def test_labels_that_are_damaged_or_of_another_teacher_are_refused(labelled, tmp_path):
    labelled(tmp_path)
    for changed in ({"teacher": "other"}, {"beam_size": 2}):
        with pytest.raises(ValueError, match=r"labels.part-0.jsonl was made with \{'teacher': 't', .*: delete it"):
            labelled(tmp_path, **changed)
    file = tmp_path / "labels.part-0.jsonl"
    file.write_text(file.read_text().replace('"log_prob"', '"log', 1))
    with pytest.raises(ValueError, match=r"is damaged: .*delete it to begin again"):
        labelled(tmp_path)


def test_shards_together_give_the_labels_of_one_process(model, processor, labelled, speech, tmp_path, monkeypatch):
    whole, seen = labelled(tmp_path / "whole"), stop_after(monkeypatch, 100)

    def part(name, *shard):
        label(model, processor, speech, tmp_path / name, shard=shard, **BATCHES)

    part("labels", 1, 2)
    assert 0 < sum(seen) < len(speech)
    with pytest.raises(ValueError, match="lacks labels"):
        collect(speech, tmp_path / "labels")
    part("labels", 0, 2)
    assert sum(seen) == len(speech)
    assert collect(speech, tmp_path / "labels") == whole
    # Apart, so that none sees what the other has done.
    part("apart0", 0, 2)
    part("apart1", 1, 2)
    assert sum(seen) == 2 * len(speech)
    # Two of three processes were killed; one goes on alone.
    part("odd", 2, 3)
    assert labelled(tmp_path / "odd") == whole
    assert sum(seen) == 3 * len(speech)


def test_audio_too_short_for_a_frame_has_an_empty_label(labelled, speech, tmp_path):
    click = Utterance("click", "", write_sound(tmp_path / "audio" / "click.wav", 0.05), 0.05)
    labels = labelled(tmp_path / "labels", [click, *speech])
    assert labels[0] == PseudoLabel("click", str(click.audio), "", 0.0, 0, 0.05)
    assert labels[1:] == labelled(tmp_path / "others")
    assert labelled(tmp_path / "alone", [click]) == labels[:1]


def test_fingerprint_is_of_the_content(model, processor, tmp_path):
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    (tmp_path / "two" / "all_results.json").write_text("{}")
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    seen = {fingerprint(tmp_path / "one")}
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        content = bytearray((tmp_path / "two" / name).read_bytes())
        content[-3] ^= 1
        (tmp_path / "two" / name).write_bytes(content)
        seen.add(fingerprint(tmp_path / "two"))
    assert len(seen) == 4
    with pytest.raises(ValueError, match="folder must hold a saved model"):
        fingerprint(tmp_path)


def made(*pairs, text="A", seconds=10.0):
    """Labels of (log_prob, tokens)."""
    return [PseudoLabel(f"u{n}", f"/a/{n}.wav", text, float(s), l, seconds) for n, (s, l) in enumerate(pairs)]


def test_scores_are_the_formula():
    source = np.random.default_rng(0)
    lengths = source.integers(1, 60, 40)
    log_probs = -0.3 * lengths - 1 + source.normal(size=40) * np.sqrt(lengths)
    labels = [*made(*zip(log_probs, lengths.tolist(), strict=True)), PseudoLabel("none", "", "", 0.0, 0, 1.0)]
    fit = fit_scores(labels)
    # The line by its covariance, and each score by itself.
    mu = np.cov(lengths, log_probs, bias=True)[0, 1] / np.var(lengths)
    beta = log_probs.mean() - mu * lengths.mean()
    ratios = [(s - mu * l - beta) / l**0.5 for s, l in zip(log_probs, lengths, strict=True)]
    sigma = (sum(r * r for r in ratios) / 40 - (sum(ratios) / 40) ** 2) ** 0.5
    assert dataclasses.astuple(fit) == pytest.approx((mu, beta, sigma), rel=1e-9)
    scores = filter_scores(labels, fit)
    np.testing.assert_allclose(scores[:-1], np.array(ratios) / sigma, rtol=1e-9)
    assert scores[-1] == -np.inf
    assert np.std(scores[:-1]) == pytest.approx(1)


def test_scores_where_there_is_no_spread():
    fit = fit_scores(line := made((-1.5, 1), (-2.5, 2), (-4.5, 4), (-0.5, 0)))
    assert (fit.mu, fit.beta, fit.sigma) == (pytest.approx(-1), pytest.approx(-0.5), 0)
    assert filter_scores(line, fit).tolist() == [0, 0, 0, -np.inf]
    fit = fit_scores(made((-1, 4), (-2, 4), (-6, 4)))
    assert fit.mu * 4 + fit.beta == pytest.approx(-3)
    assert fit.sigma == pytest.approx(np.std([-1, -2, -6]) / 2)
    with pytest.raises(ValueError, match="hypothesis with tokens, got none"):
        fit_scores(line[3:])


def test_the_best_are_kept(processor):
    # Of four tokens each, so that the order of scores is that of probabilities.
    labels = made(*((-value, 4) for value in (5, 1, 3, 9, 2, 7)))
    for keep, expected in ((1, "012345"), (0.5, "124"), (0.34, "14"), (0.01, "1")):
        chosen = select(labels, processor, keep=keep)
        assert "".join(one.id[1] for one in chosen.kept) == expected
        assert chosen.counts() == ({"not among the best": 6 - len(expected)} if keep < 1 else {})
    for keep in (0, 1.1):
        with pytest.raises(ValueError, match="keep must be a fraction"):
            select(labels, processor, keep=keep)


def test_what_no_training_can_use_is_dropped_first(processor):
    good = made((-1, 4), (-2, 4), (-9, 4))
    rows = [("no words", "", 10.0, 0), ("no words", "  ", 10.0, 2), ("longer than a batch", "GO", 20.01, 2)]
    rows += [("symbols that no transcript has", text, 10.0, 1) for text in ("GO <unk>", "a")]
    rows += [("more tokens than frames", "IT'S " * 40, 4.0, 3)]
    labels = [PseudoLabel(f"b{n}", "/x.wav", text, -99.0, l, s) for n, (_, text, s, l) in enumerate(rows)]
    chosen = select([*labels, *good], processor, keep=0.67, max_seconds=20.0)
    assert [one.id for one in chosen.kept] == ["u0", "u1"]
    expected = {f"b{n}": row[0] for n, row in enumerate(rows)} | {"u2": "not among the best"}
    assert chosen.dropped == expected
    assert chosen.fit == fit_scores(good)
    with pytest.raises(ValueError, match="no label can be used, of 6: 2 no words, 1 longer than a batch, 2 symbols"):
        select(labels, processor, max_seconds=20.0)


def test_kept_transcripts_fit_with_the_tokenizer_of_the_training(processor):
    texts = [transcript(number) for number in range(40)] + ["FALL BALL", "AAAA"]
    student = ConformerProcessor(processor.feature_extractor, train_tokenizer(texts, "unigram", 28))
    labels = [
        PseudoLabel(f"{number}-{seconds}", "/x.wav", text, -1.0, 3, seconds)
        for number, text in enumerate(texts)
        for seconds in np.arange(0.2, 1.5, 0.1)
    ]
    utterances, counts = [Utterance(one.id, one.text, b"", one.seconds) for one in labels], []
    for options in ({"ctc": False}, {"ctc": True}, {"ctc": True, "fastest": 1.25}):
        chosen, fit = select(labels, student, **options), check_lengths(utterances, student, Skipped(1.0), **options)
        assert [one.id for one in chosen.kept] == [one.id for one in fit]
        counts.append(len(fit))
    assert len(labels) > counts[0] > counts[1] > counts[2] > 0


def test_manifest_is_read_back(labelled, speech, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = [dataclasses.replace(one, audio=one.audio.relative_to(tmp_path)) for one in speech]
    labels = labelled(tmp_path / "labels", relative)
    labels = [dataclasses.replace(one, text=transcript(n)) for n, one in enumerate(labels)]
    path = pseudo_labels.write_manifest(labels[2:4], tmp_path / "chosen.jsonl")
    monkeypatch.chdir("/")
    assert read_manifest(path) == speech[2:4]
    assert [one.seconds for one in load_speech(path)[0]] == [0.7, 1.1]


def test_folder_of_audio_without_transcripts(tmp_path):
    for name in ("b/two.flac", "one.wav", "b/c/three.mp3"):
        write_sound(tmp_path / "audio" / name, 0.5)
    (tmp_path / "audio" / "notes.txt").write_text("nothing")
    found, skipped = load_speech(tmp_path / "audio", transcripts=False, prepared=tmp_path / "ready")
    names = ("b/c/three.mp3", "b/two.flac", "one.wav")
    assert [(one.id, one.text) for one in found] == [(name, "") for name in names]
    assert found[1].seconds == 0.5
    assert not skipped.reasons
    inner, _ = load_speech(tmp_path / "audio", "b", transcripts=False)
    assert [one.id for one in inner] == ["b/c/three.mp3", "b/two.flac"]
    (tmp_path / "audio" / "bad.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"bad\.wav"):
        load_speech(tmp_path / "audio", transcripts=False)
    found, skipped = load_speech(tmp_path / "audio", transcripts=False, max_bad=1)
    assert (len(found), len(skipped)) == (3, 1)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"found no .*flac"):
        load_speech(tmp_path / "none", transcripts=False)
    with pytest.raises(ValueError, match=r"expected one \.jsonl"):
        load_speech(tmp_path / "audio")


def test_librispeech_without_some_transcripts(tmp_path):
    folder = librispeech(tmp_path)
    (folder / "LibriSpeech" / "dev" / "7" / "107" / "7-107.trans.txt").unlink()
    found, _ = load_speech(folder, "dev", transcripts=False)
    texts = {"12/112/12-112-0001": transcript(1), "12/112/12-112-0003": transcript(3)}
    texts |= {"7/107/7-107-0000": "", "7/107/7-107-0002": ""}
    assert {one.id: one.text for one in found} == {f"dev/{name}.flac": text for name, text in texts.items()}
    with pytest.raises(ValueError, match="no transcript"):
        load_speech(folder, "dev")


def test_manifest_without_texts(tmp_path):
    for number in range(3):
        write_sound(tmp_path / f"{number}.wav", 0.5)
    rows = [{"audio": "0.wav"}, {"audio": "1.wav", "text": None}, {"audio": "2.wav", "text": "go!"}]
    write_manifest(tmp_path / "more.jsonl", rows)
    (tmp_path / "table.csv").write_text("audio\n0.wav\n1.wav\n2.wav\n")
    assert [one.text for one in load_speech(tmp_path, "more", transcripts=False)[0]] == ["", "", "GO"]
    assert [one.text for one in load_speech(tmp_path / "table.csv", transcripts=False)[0]] == ["", "", ""]
    with pytest.raises(ValueError, match=r"more\.jsonl:1: text must be given"):
        load_speech(tmp_path, "more")
    with (tmp_path / "more.jsonl").open("a") as stream:
        stream.write('{"text": "GO"}\n')
    with pytest.raises(ValueError, match=r"more\.jsonl:4: audio must be given"):
        load_speech(tmp_path, "more", transcripts=False)
    with pytest.raises(ValueError, match="source must be a folder or a manifest"):
        load_speech("some/dataset", "train", transcripts=False)
