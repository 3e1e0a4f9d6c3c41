"""The demo's generated task is what it claims to be, and the demo runs."""

import csv
import json
from collections import Counter

import pytest
from launching import Forked
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from favor.eval import demo
from favor.eval.common import launch
from favor.eval.common.pretrained import minilm_path, sha256_of
from favor.eval.glue import demo_task
from favor.train.text.glue_data import load_glue


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return demo_task.generate(tmp_path_factory.mktemp("task"))


def read(data_dir, split: str) -> list[dict[str, str]]:
    with (data_dir / "RTE" / f"{split}.tsv").open(newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def words(text: str) -> Counter:
    return Counter(text.lower().replace(".", " ").replace(",", " ").split())


def test_same_bytes_each_time(data_dir, tmp_path):
    again = demo_task.generate(tmp_path)
    for split in ("train", "dev"):
        assert sha256_of(data_dir / "RTE" / f"{split}.tsv") == sha256_of(again / "RTE" / f"{split}.tsv")


def test_the_training_program_reads_it(data_dir):
    data = load_glue("rte", data_dir)
    rows = demo_task.dev_examples()
    assert data.evaluation["validation"]["sentence1"][:] == [row.sentence1 for row in rows]
    labels = data.task.labels
    found = [labels[label] for label in data.evaluation["validation"]["label"]]
    assert found == [demo_task.LABELS[row.label] for row in rows]


@pytest.mark.parametrize("split", ["train", "dev"])
def test_balanced_and_without_duplicates(data_dir, split):
    rows = read(data_dir, split)
    counts = Counter(row["label"] for row in rows)
    assert counts["entailment"] == counts["not_entailment"] == len(rows) / 2
    assert len({(row["sentence1"], row["sentence2"]) for row in rows}) == len(rows)
    assert [int(row["index"]) for row in rows] == list(range(len(rows)))
    # sentence2 alone says nothing: every one of them has both labels about as often.
    for _, pair in Counter(row["sentence2"] for row in rows).items():
        assert pair > len(rows) / 4
    by_statement = Counter((row["sentence2"], row["label"]) for row in rows)
    for statement in {row["sentence2"] for row in rows}:
        share = by_statement[statement, "entailment"] / (len(rows) / 2)
        other = by_statement[statement, "not_entailment"] / (len(rows) / 2)
        assert abs(share - other) < 0.15


def test_splits_share_no_row(data_dir):
    train = {(row["sentence1"], row["sentence2"]) for row in read(data_dir, "train")}
    assert not train & {(row["sentence1"], row["sentence2"]) for row in read(data_dir, "dev")}


def test_label_follows_from_the_verdict_on_the_thing_named(data_dir):
    """A reader written apart from the generator: find the named thing's sentence, look at its first adjective."""
    good = {pair[0] for pair in demo_task.VERDICTS}
    for row in read(data_dir, "dev"):
        thing = row["sentence2"].split()[1]
        (sentence,) = [text for text in row["sentence1"].split(". ") if f"The {thing} was " in text]
        said = sentence.split(" was ")[1].split()[0]
        assert (row["label"] == "entailment") == (said in good)


def test_turning_a_verdict_round_keeps_the_words():
    turned = [demo_task.example(seed, good=True) for seed in range(20)]
    other = [demo_task.example(seed, good=False) for seed in range(20)]
    for one, two in zip(turned, other, strict=True):
        assert one.sentence1 != two.sentence1
        assert one.sentence2 == two.sentence2
        assert words(one.sentence1) == words(two.sentence1)


def test_a_bag_of_words_can_only_guess():
    """With far more rows than the demo trains on; and sentence2 alone can only guess too."""
    train, held_out = demo_task.examples(10, 4000), demo_task.examples(11, 2000)
    for text in (lambda row: row.sentence1 + " / " + row.sentence2, lambda row: row.sentence2):
        classifier = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=500))
        classifier.fit([text(row) for row in train], [row.label for row in train])
        accuracy = classifier.score([text(row) for row in held_out], [row.label for row in held_out])
        assert abs(accuracy - 0.5) < 0.04  # 3.6 standard deviations of a coin


def test_lengths(data_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    rows = read(data_dir, "dev")
    lengths = [len(tokenizer(row["sentence1"], row["sentence2"])["input_ids"]) for row in rows]
    assert 95 <= sum(lengths) / len(lengths) <= 200
    assert max(lengths) <= demo.MAX_LENGTH


def test_damaged_weights_are_refused():
    with pytest.raises(ValueError, match=r"expected .*model\.safetensors to have sha256 0000, got 53aa"):
        minilm_path(expected="0000")


@pytest.mark.slow
def test_the_demo_runs(tmp_path, capsys, monkeypatch):
    # Few rows, and trainings that do not import everything again; their command is tested with the tables of GLUE.
    monkeypatch.setattr(launch, "subprocess", Forked)
    monkeypatch.setattr(demo_task, "DEV_ROWS", 16)
    monkeypatch.setattr(demo, "COSINE_ROWS", 4)
    monkeypatch.setattr(demo, "BATCH_SIZE", 4)
    assert demo.main(["--output_dir", str(tmp_path), "--max_train_steps", "1", "--num_features", "16"]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "demo.json").read_text())
    names = ["sdpa", "favor+", "favor++", "favor#", "favor#:landmark"]
    assert list(content["results"]) == names
    for backend, results in content["results"].items():
        name, _, features = backend.partition(":")
        assert results["attn_implementation"] == name
        assert not features or results["favor"]["features"] == features
        assert results["favor"] is None or results["favor"]["exact_below"] == 0
        assert f"{100 * results['metrics']['accuracy']:.1f} %" in printed
    cosines = content["cosine_before_fine_tuning"]
    assert cosines["sdpa"] == pytest.approx(1.0, abs=1e-5)
    assert all(0.0 < cosines[name] < 0.999 for name in names[1:])
    assert "| favor++ |" in (tmp_path / "demo.md").read_text()
    # The folder to go on with is that of the best linear model.
    scores = {name: content["results"][name]["metrics"]["accuracy"] for name in names[1:]}
    best = launch.Backend.parse(max(scores, key=scores.get)).slug
    assert f'from_pretrained("{tmp_path / best}")' in printed


def test_the_model_to_go_on_with_is_the_best_linear_one():
    scores = {"sdpa": 0.77, "favor+": 0.5, "favor#": 0.5, "favor#:landmark": 0.762}
    results = {name: {"metrics": {"accuracy": value}} for name, value in scores.items()}
    assert demo.best_linear(results) == "favor#:landmark"
