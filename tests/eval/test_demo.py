"""The demo: its documents and its task are what they claim to be, its readers are compared fairly, and it runs."""

import csv
import json
import random
from collections import Counter

import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from favor.eval.common.pretrained import minilm_path
from favor.eval.demo import __main__ as demo
from favor.eval.demo import tasks
from favor.eval.demo.tasks import FILE, HALF, WHOLE, Reader, Reading, documents
from favor.train.text.glue_data import load_glue


def test_every_document_has_its_origin_and_fills_two_halves():
    found, origin = documents(), (FILE.parent / "ORIGIN.md").read_text()
    assert Counter(document.title for document in found) == dict.fromkeys({d.title for d in found}, 3)
    assert len({document.text for document in found}) == len(found) == 39
    tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    for document in found:
        assert f"| {document.title} | {document.year} |" in origin
        assert document.author in origin
        assert document.year < 1930
        pieces = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        assert 2 * HALF <= WHOLE <= len(pieces) + 2 <= WHOLE + 10


def test_accuracy_counts_halves_both_ways_and_so_does_the_cosine():
    """Documents 0 and 1 find each other's halves; document 2 finds its second half, but its second half finds 0."""
    first = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    second = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0.8, 0, 0.6]])
    assert Reading(torch.stack([first, second], 1), {}).accuracy() == pytest.approx(1 / 6)
    assert Reading(torch.stack([3 * first, first], 1), {}).accuracy() == 1
    one, other = torch.tensor([[[1.0, 0], [0, 2]]]), torch.tensor([[[3.0, 0], [1, 1]]])
    assert Reading(one, {}).cosine(Reading(other, {})) == pytest.approx((1 + 0.5**0.5) / 2)  # a mean over all halves


def test_readers_read_the_same_text(monkeypatch):
    """All tokens of a text count, but for the reader that cuts it; a mean for every key is exact attention."""
    monkeypatch.setattr(tasks, "HALF", 64)
    every = Reader("landmark", "landmark", {"num_features": 64, "selected_keys": 0, "exact_below": 0})
    readers = (Reader("exact"), Reader("cut", cut=32), every)
    texts = documents(2)
    with tasks.tqdm(disable=True) as bar:
        found = tasks.read_all(readers, minilm_path(), texts, (96,), bar, seed=0)
        assert found["exact"].embeddings.shape == (2, 2, 384)
    torch.testing.assert_close(found["landmark"].embeddings, found["exact"].embeddings, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    pieces = tokenizer(texts[1].text, add_special_tokens=False, verbose=False)["input_ids"]
    model = readers[0].load(minilm_path(), 0)
    for label, last in (("exact", 62), ("cut", 30)):
        ids = torch.tensor([[101, *pieces[62 : 62 + last], 102]])
        with torch.no_grad():
            wanted = model(input_ids=ids).last_hidden_state.mean(1)[0]
        torch.testing.assert_close(found[label].embeddings[1, 1], wanted, atol=1e-5, rtol=1e-5)
    assert {length: len(times) for length, times in found["cut"].seconds.items()} == {64: 4, 96: 2}


def test_positions_repeat_after_512():
    """A token's position is the one it would have in a text of its own, 512 tokens long."""
    model, seen = Reader("exact").load(minilm_path(), 0), []
    model.embeddings.position_embeddings.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    tasks.embed(model, AutoTokenizer.from_pretrained(minilm_path()), [2000] * 1022)
    assert seen[0].flatten().tolist() == [*range(512), *range(512)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tasks.generate(tmp_path_factory.mktemp("task"), documents(), 320, seed=0)


def read(data_dir, split: str) -> list[tuple[str, str]]:
    with (data_dir / "SST-2" / f"{split}.tsv").open(newline="") as stream:
        rows = list(csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert rows[0] == ["sentence", "label"]
    return [(text, label) for text, label in rows[1:]]


def test_every_passage_is_there_in_order_and_shuffled(data_dir):
    whole = [" ".join(document.text.split()) for document in documents()]
    for split, size, part in (("train", 320, whole[:19]), ("dev", 100, whole[19:])):
        rows = read(data_dir, split)
        assert len(rows) == size
        ordered = [text for text, label in rows if label == "1"]
        shuffled = [text for text, label in rows if label == "0"]
        assert all(any(text in document for document in part) for text in ordered)
        assert not any(text in document for text in shuffled for document in part)
        bags = [Counter(frozenset(Counter(text.split()).items()) for text in texts) for texts in (ordered, shuffled)]
        assert bags[0] == bags[1]
        assert len(bags[0]) == size / 2


def test_the_task_is_the_same_each_time_and_other_with_another_seed(data_dir, tmp_path):
    first, again, other = (read(tasks.generate(tmp_path / str(i), documents(), 320, i // 2), "train") for i in range(3))
    assert first == again == read(data_dir, "train") != other


def test_the_training_program_reads_it_and_a_bag_of_words_can_only_guess(data_dir):
    found = load_glue("sst2", data_dir).evaluation["validation"]
    train, dev = read(data_dir, "train"), read(data_dir, "dev")
    assert [(text, str(label)) for text, label in zip(found["sentence"], found["label"], strict=True)] == dev
    classifier = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=500))
    classifier.fit(*zip(*train, strict=True))
    assert classifier.score(*zip(*dev, strict=True)) == 0.5  # both forms of a passage get one answer


def test_what_is_not_there_or_damaged_is_refused():
    for number in (1, 40):
        with pytest.raises(ValueError, match=f"from 2 to 39, got {number}"):
            documents(number)
    with pytest.raises(ValueError, match=r"2 documents have .* passages of 180 words, 1000 are needed"):
        tasks.passages(documents(2), 1000, random.Random(0))
    with pytest.raises(ValueError, match=r"expected .*model\.safetensors to have sha256 0000, got 53aa"):
        minilm_path(expected="0000")


def reading(found: int, seconds: dict[int, float]) -> Reading:
    """Of 10 documents `found` are told apart; the halves of the others are alike."""
    halves = torch.eye(11)[[min(i, found) for i in range(10)]]
    return Reading(torch.stack([halves, halves], 1), {length: [time] for length, time in seconds.items()})


FAST, GOOD = (0.5, 1.0), (0.95, 0.93)
FAILING = [
    (5, 9, FAST, GOOD, None),
    (5, 7, FAST, GOOD, "lose at most 2 points"),
    (9, 9, FAST, GOOD, "10 points more"),
    (5, 9, (0.9, 1.0), GOOD, "4,096 tokens"),
    (5, 9, (0.5, 2.1), GOOD, "8,192 tokens"),
    (5, 9, FAST, (0.90, 0.89), "above 90 %"),
    (5, 9, FAST, (0.95, 0.91), "at most 3 points less"),
]


@pytest.mark.parametrize(("cut", "landmark", "seconds", "scores", "failing"), FAILING)
def test_checks_say_what_does_not_hold(cut, landmark, seconds, scores, failing):
    readings = {
        demo.CUT_SHORT: reading(cut, {HALF: 0.1, WHOLE: 0.1}),
        demo.EXACT: reading(9, {HALF: 1.0, WHOLE: 4.0}),
        demo.LANDMARKS: reading(landmark, dict(zip((HALF, WHOLE), seconds, strict=True))),
    }
    found = demo.checks(readings, dict(zip(("sdpa", "landmark"), scores, strict=True)))
    wrong = [check.statement for check in found if not check.holds]
    assert len(wrong) == (failing is not None)
    assert all(failing in statement for statement in wrong)


@pytest.mark.slow
def test_the_demo_runs(tmp_path, capsys, monkeypatch):
    """With halves of 64 tokens, one step, and eight rows to evaluate."""
    sizes = {"HALF": 64, "WHOLE": 128, "LENGTHS": (96, 128), "MAX_LENGTH": 64}
    for name, value in (sizes | {"TIMED": 1, "BATCH_SIZE": 4, "DEV_PASSAGES": 4}).items():
        monkeypatch.setattr(tasks, name, value)
        monkeypatch.setattr(demo, name, value, raising=False)
    words = ["--output_dir", str(tmp_path), "--documents", "4", "--max_train_steps", "1", "--seed", "3"]
    assert demo.main(words) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "demo.json").read_text())
    assert list(content["readings"]) == [reader.label for reader in demo.READERS]
    assert list(content["fine_tuned"]) == ["sdpa", "landmark", "favor#", "favor+"]
    assert "all_results.json" in {path.name for path in (tmp_path / "exact").iterdir()}
    assert (tmp_path / "demo.png").read_bytes()[1:4] == b"PNG"
    written = (tmp_path / "demo.md").read_text()
    for reader in demo.READERS:
        row = f"| {reader.label} | {100 * content['readings'][reader.label]['found']:.1f} % |"
        row += f" {content['readings'][reader.label]['cosine']:.3f} |"
        assert row in written
        assert row in printed
    assert "came back with 6 of 6 layers linear" in printed
    # The lines that a user copies give the model that was saved.
    folder = tmp_path / "landmark"
    assert f'AutoModelForSequenceClassification.from_pretrained("{folder}")' in printed
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config._attn_implementation == "landmark"
    assert model.config.favor["exact_below"] == 0
    assert model.config.favor["num_features"] == model.config.favor["selected_keys"] == tasks.NUM_FEATURES
    weights = model.state_dict()
    exact = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exact").state_dict()
    assert all(torch.equal(weights[name], exact[name]) for name in exact)
