"""Noisy student training on speech of tones: what the student sees, kills, errors, two processes."""

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from launching import forget_accelerator, fork, options
from safetensors.torch import load_file
from speech_corpus import write_manifest, write_shard

from favor.models.conformer.configuration_conformer import PRESETS
from favor.train import asr, nst
from favor.train.common import loop
from favor.train.speech import loaders, pseudo_labels
from favor.train.speech.manifests import read_manifest

TONES = {"A": 500.0, "E": 1500.0, "O": 3000.0}
WORDS = ["".join(letters) for size in (1, 2) for letters in itertools.product(TONES, repeat=size)]
POISON = "ZEBRA"
DOT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DOT |= {"conv_kernel_size": 3, "subsampling_conv_channels": 16, "num_mel_bins": 20}


def spoken(word, seed):
    """A tone a letter, with pauses and a little noise."""
    source, pieces = np.random.default_rng(seed), [np.zeros(1600)]
    for letter in word:
        time = np.arange(round(source.uniform(0.16, 0.24) * 16000)) / 16000
        edges = np.minimum(1, 100 * np.minimum(time, time[::-1]))
        pieces += [0.3 * np.sin(2 * np.pi * TONES[letter] * time) * edges, np.zeros(1600)]
    wave = np.concatenate(pieces)
    return wave + 0.003 * source.normal(size=len(wave))


def write(folder, name, words, seed):
    """A manifest and its audio."""
    (folder / name).mkdir(parents=True)
    lines = []
    for number, word in enumerate(words):
        soundfile.write(folder / name / f"{number}.flac", spoken(word, seed + number), 16000)
        lines.append({"audio": f"{name}/{number}.flac", "text": word})
    write_manifest(folder / f"{name}.jsonl", lines)


def labels_in(folder, name="labels"):
    """Settings and labels of a generation."""
    parts = [path.read_text().splitlines() for path in sorted((folder / name).glob("*.jsonl"))]
    labels = [pseudo_labels.PseudoLabel(**json.loads(line)) for lines in parts for line in lines[1:]]
    return json.loads(parts[0][0])["settings"], labels


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Splits train, dev and more; poisoned is more with other transcripts, silent is more without."""
    folder, source = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for number, (name, size) in enumerate({"train": 24, "dev": 6, "more": 10}.items()):
        write(folder, name, source.choices(WORDS, k=size), 100 * number)
    audio = [{"audio": f"more/{number}.flac"} for number in range(10)]
    write_manifest(folder / "silent.jsonl", audio)
    write_manifest(folder / "poisoned.jsonl", [row | {"text": POISON} for row in audio])
    return folder


@pytest.fixture(scope="module")
def preset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "dot", DOT)
        patch.setattr(loaders, "DITHER", 0.0)
        yield "dot"


# Of a training that is the same each time.
SETTINGS = {"eval_splits": "dev", "attn_implementation": "sdpa", "spec_augment": "0 0 1 0.05"}
SETTINGS |= {"per_device_train_batch_seconds": 4, "learning_rate": 1e-2, "ema_decay": 0.9}


def words(corpus, output, **values):
    return options({"data_dir": corpus, "output_dir": output, **SETTINGS, **values})


NEW = {"preset": "dot", "tokenizer_type": "char", "dropout": 0}


@pytest.fixture(scope="module")
def teacher(corpus, preset, tmp_path_factory):
    """A model that understands most of it."""
    folder = tmp_path_factory.mktemp("teacher")
    results = asr.main(words(corpus, folder, max_train_steps=100, **NEW, speeds=1, spec_augment="0 0 0 0"))
    assert results["metrics"]["dev_cer"] < 30
    forget_accelerator()
    return folder


def student(first):
    noise = {"teacher": first, "generations": 2, "keep": 0.6, "beam_size": 3, "unlabelled_split": "poisoned"}
    return noise | {"model_name_or_path": first, "max_train_steps": 3, "learning_rate": 1e-3, "checkpointing_steps": 1}


def start(corpus, first, output, *flags, **values):
    """Two students, a few steps from the first teacher."""
    try:
        return nst.main([*words(corpus, output, **student(first) | values), *flags])
    finally:
        forget_accelerator()


@pytest.fixture(scope="module")
def whole(corpus, teacher, tmp_path_factory):
    """An uninterrupted run, and the utterances that each student was trained on."""
    seen, train_model = [], asr._train_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asr, "_train_model", lambda *given: seen.append(given[1][0]) or train_model(*given))
        output = tmp_path_factory.mktemp("whole")
        results = start(corpus, teacher, output)
    return output, results, seen


def test_students_see_what_was_kept_and_nothing_of_the_rest(whole, corpus, teacher):
    output, results, seen = whole
    labelled = read_manifest(corpus / "train.jsonl")
    assert len(seen) == 2
    for number, utterances in enumerate(seen, 1):
        labels = {one.id: one for one in labels_in(output / f"gen_{number}")[1]}
        assert len(labels) == 10
        own, added = utterances[:24], utterances[24:]
        assert [(one.id, one.text) for one in own] == [(one.id, one.text) for one in labelled]
        choice = results["generations"][number]["pseudo_labels"]
        unusable = sum(count for reason, count in choice["dropped"].items() if reason != "not among the best")
        assert (choice["labelled"], choice["kept"]) == (10, len(added))
        assert len(added) == round(0.6 * (10 - unusable)) > 2
        assert sum(choice["dropped"].values()) == 10 - len(added)
        for one in added:
            label = labels[one.id]
            assert (one.text, str(one.audio), one.seconds) == (label.text, label.audio, label.seconds)
        fit, kept = choice["fit"], {one.id for one in added}
        told = [one for one in labels.values() if one.tokens]
        score = {one.id: (one.log_prob - fit["mu"] * one.tokens - fit["beta"]) / one.tokens**0.5 for one in told}
        assert min(score[name] for name in kept) >= max(score[name] for name in score if name not in kept)
        results_of_training = json.loads((output / f"gen_{number}" / "all_results.json").read_text())
        assert results_of_training["utterances"]["train"] == len(utterances)


def test_each_teacher_is_the_student_before(whole, teacher):
    output, results, _ = whole
    assert [one["generation"] for one in results["generations"]] == [0, 1, 2]
    assert [one.get("teacher") for one in results["generations"]] == [None, str(teacher), str(output / "gen_1")]
    told = [labels_in(output / f"gen_{number}")[0]["teacher"] for number in (1, 2)]
    assert told == [pseudo_labels.fingerprint(teacher), pseudo_labels.fingerprint(output / "gen_1")]
    assert told[0] != told[1]
    weights = [load_file(folder / "model.safetensors") for folder in (teacher, output / "gen_1", output / "gen_2")]
    assert not torch.equal(weights[0]["ctc_head.weight"], weights[1]["ctc_head.weight"])
    assert not torch.equal(weights[1]["ctc_head.weight"], weights[2]["ctc_head.weight"])


def test_transcripts_of_the_untranscribed_never_reach_a_training(whole, corpus, teacher, tmp_path):
    output, results, seen = whole
    # They are used for the report: nothing the teacher says is ever right.
    first = results["generations"][1]["pseudo_labels"]
    assert first["errors"]["wer"] >= 100
    assert first["kept_errors"]["wer"] >= 100
    for utterances in seen:
        assert not any(POISON in one.text for one in utterances)
    for path in output.rglob("*"):
        assert not path.is_file() or POISON.encode() not in path.read_bytes()
    choices = {}
    for split in ("silent", "more"):
        again = start(corpus, teacher, tmp_path / split, unlabelled_split=split, generations=1)
        for name in ("gen_1/model.safetensors", "gen_1/pseudo_labels.jsonl", "gen_1/labels/labels.part-0.jsonl"):
            assert (tmp_path / split / name).read_bytes() == (output / name).read_bytes()
        choices[split] = again["generations"][1]["pseudo_labels"]
    assert choices["silent"]["errors"] is choices["silent"]["kept_errors"] is None
    truth = {one.id: one.text for one in read_manifest(corpus / "more.jsonl")}
    kept = read_manifest(output / "gen_1" / "pseudo_labels.jsonl")
    # One word each: the rate is the part that is wrong.
    wrong = sum(one.text != truth[one.id] for one in kept)
    assert choices["more"]["kept_errors"]["wer"] == pytest.approx(100 * wrong / len(kept))
    assert choices["more"]["errors"]["wer"] < 60


def stop_at(patch, place, count):
    """The process ends at the count-th call of labelling a batch or of beginning a training step."""
    owner, name = {"labelling": (pseudo_labels, "search"), "training": (loop, "mix")}[place]
    original, calls = getattr(owner, name), itertools.count(1)

    def call(*given, **options):
        if next(calls) == count:
            raise KeyboardInterrupt
        return original(*given, **options)

    patch.setattr(owner, name, call)


def test_a_run_killed_anywhere_ends_as_an_uninterrupted_one(whole, corpus, teacher, tmp_path, monkeypatch, capsys):
    output, results, _ = whole
    flags = ()
    # Into the first labelling, the first training, the second of each; batches are few.
    for place, count in (("labelling", 1), ("training", 3), ("labelling", 2), ("training", 2)):
        with monkeypatch.context() as patch:
            stop_at(patch, place, count)
            with pytest.raises(KeyboardInterrupt):
                start(corpus, teacher, tmp_path / "run", *flags)
        flags = ("--resume",)
    resumed = start(corpus, teacher, tmp_path / "run", *flags)
    assert capsys.readouterr().out.count("continuing from checkpoint-") == 2
    for number in (1, 2):
        for name in ("model.safetensors", "labels/labels.part-0.jsonl", "pseudo_labels.jsonl"):
            ends = [(folder / f"gen_{number}" / name).read_bytes() for folder in (output, tmp_path / "run")]
            assert ends[0] == ends[1]
    for one, other in zip(results["generations"], resumed["generations"], strict=True):
        assert {**one, "folder": "", "teacher": ""} == {**other, "folder": "", "teacher": ""}
    # Finished generations are only read.
    monkeypatch.setattr(asr, "main", None)
    monkeypatch.setattr(nst, "label", None)
    again = start(corpus, teacher, tmp_path / "run", *flags)
    assert again["generations"] == resumed["generations"]
    assert json.loads((tmp_path / "run" / "nst.json").read_text()) == json.loads(json.dumps(again))


def test_a_folder_with_a_run_is_not_written_over_by_accident(whole, corpus, teacher):
    output, _, _ = whole
    with pytest.raises(ValueError, match=r"holds a run already: .*--resume.*--overwrite_output_dir"):
        start(corpus, teacher, output)
    with pytest.raises(ValueError, match=r"cannot resume .*keep was 0\.6 and is 0\.5; learning_rate was 0\.001"):
        start(corpus, teacher, output, "--resume", keep=0.5, learning_rate=0.1)
    with pytest.raises(ValueError, match="set one of them"):
        start(corpus, teacher, output, "--resume", "--overwrite_output_dir")


def test_a_new_start_keeps_what_no_run_wrote(tmp_path):
    run = ["nst.json", "gen_1/settings.json", "gen_1/labels/labels.part-0.jsonl", "gen_1/labels/labels.part-1.jsonl"]
    results = ["gen_1/all_results.json", "gen_1/checkpoint-3/settings.json"]
    others = ["gen_ideas/all_results.json", "gen_2/all_results.json", "gen_1/notes.txt", "gen_1/labels/mine.jsonl"]
    for name in (*run, *results, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    nst._clear(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*others, "gen_1/settings.json"}


def test_starting_again_with_a_manifest_of_the_user(corpus, teacher, tmp_path, capsys):
    start(corpus, teacher, tmp_path, generations=1, keep=0.2)
    old = (tmp_path / "gen_1" / "pseudo_labels.jsonl").read_text()
    values = {"generations": 1, "keep": 1, "extra_manifests": corpus / "dev.jsonl"}
    capsys.readouterr()
    results = start(corpus, teacher, tmp_path, "--overwrite_output_dir", **values)
    choice = results["generations"][1]["pseudo_labels"]
    assert (tmp_path / "gen_1" / "pseudo_labels.jsonl").read_text() != old
    assert results["generations"][1]["utterances"]["train"] == 24 + 6 + choice["kept"]
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert re.split(r"\s\s+", table[0].strip())[-2:] == ["dev_wer", "dev_cer"]
    assert table[2].split()[:4] == ["1", "10", str(choice["kept"]), str(10 - choice["kept"])]
    assert table[2].split()[-2] == f"{results['generations'][1]['metrics']['dev_wer']:.2f}"
    assert table[1].split()[:4] == ["0", "-", "-", "-"]


def test_arguments_are_checked_before_anything_runs(corpus, teacher, tmp_path):
    for told, values in {
        "preset must be one of": {"preset": "huge"},
        "keep must be greater than 0 and at most 1": {"keep": 1.5},
        "keep must be greater than 0": {"keep": 0},
        "generations must be greater": {"generations": 0},
        "beam_size must be greater": {"beam_size": 0},
        "have no effect without language_model": {"word_score": 1},
        "language_model must be a file": {"language_model": tmp_path / "none"},
        "unlabelled_dir must be a folder or a manifest": {"unlabelled_dir": tmp_path / "none"},
        r"expected the folder of a saved model, got .*, which holds no config\.json": {"teacher": tmp_path},
    }.items():
        with pytest.raises(ValueError, match=told):
            start(corpus, teacher, tmp_path / "run", **values)
    with pytest.raises(ValueError, match="unlabelled_split must say which split"):
        nst.main(words(corpus, tmp_path / "run"))
    with pytest.raises(ValueError, match="must be a folder or a manifest, got None"):
        nst.main(["--output_dir", str(tmp_path / "run"), "--unlabelled_split", "train"])
    assert not (tmp_path / "run").exists()


def test_tar_shards_and_a_teacher_of_another_kind_are_refused(corpus, preset, teacher, tmp_path, monkeypatch):
    shard = write_shard(tmp_path / "more.tar", [("a.flac", (corpus / "more" / "0.flac").read_bytes())])
    monkeypatch.setattr(asr, "main", None)  # before a teacher is trained
    with pytest.raises(ValueError, match=r"must be audio files, .* more/a is .*more\.tar/a\.flac\. Write the audio"):
        nst.main(words(corpus, tmp_path / "run", unlabelled_dir=shard, max_train_steps=1, **NEW))
    config = json.loads((teacher / "config.json").read_text()) | {"architectures": ["ConformerModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must be one of ConformerForCTC, .* got ConformerModel"):
        nst._load_teacher(tmp_path, None)


@pytest.mark.slow
def test_from_nothing(corpus, preset, tmp_path):
    """Generation 0 is trained too, with linear attention, which the teacher then labels with."""
    values = {"generations": 1, "keep": 0.8, "beam_size": 3, "max_train_steps": 70, "speeds": "1"}
    values |= {"attn_implementation": "favor+", "num_features": 16, "exact_below": 0, "spec_augment": "0 0 0 0"}
    audio = corpus / "more"
    results = nst.main(words(corpus, tmp_path, unlabelled_dir=audio, **NEW, **values))
    assert [one["utterances"]["train"] for one in results["generations"]] == [24, 32]
    assert results["generations"][1]["teacher"] == str(tmp_path / "gen_0")
    labels = read_manifest(tmp_path / "gen_1" / "pseudo_labels.jsonl")
    assert {one.audio.parent for one in labels} == {audio}
    truth = {Path(one.audio).name: one.text for one in read_manifest(corpus / "more.jsonl")}
    right = sum(truth[one.audio.name] == one.text for one in labels)
    assert right >= len(labels) / 4


@pytest.mark.slow
def test_two_processes_share_the_labelling_and_train_one_generation_after_another(corpus, teacher, whole, tmp_path):
    more = {"max_train_steps": 2, "unlabelled_split": "more", "per_device_train_batch_seconds": 8}
    printed = fork("favor.train.nst", *words(corpus, tmp_path, **student(teacher) | more), processes=2)
    results = json.loads((tmp_path / "nst.json").read_text())
    assert results["num_processes"] == 2
    assert printed.count("labelled") == 1
    texts = [{one.id: one.text for one in labels_in(folder / "gen_1")[1]} for folder in (tmp_path, whole[0])]
    assert texts[0] == texts[1]
    for one in results["generations"][1:]:
        assert one["pseudo_labels"]["labelled"] == 10
        assert one["utterances"]["train"] == 24 + one["pseudo_labels"]["kept"]
