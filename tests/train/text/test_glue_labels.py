"""Labels of a checkpoint that was trained before: ordered by their names or refused, never renamed in silence."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig

from favor.train.text.glue_data import get_task
from favor.train.text.glue_models import _set_labels, is_classifier, label_rows, rows_set


@pytest.mark.parametrize(
    ("task", "names", "rows"),
    [
        ("rte", ["entailment", "not_entailment"], [0, 1]),
        ("rte", ["NOT_ENTAILMENT", "ENTAILMENT"], [1, 0]),
        ("qnli", ["Non-Entailment", "entail"], [1, 0]),
        ("wnli", ["entailed", "no entailment"], [1, 0]),
        ("mnli", ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], [2, 1, 0]),
        ("mnli", ["contradict", "entails", "Neutral"], [1, 2, 0]),
        ("mrpc", ["Paraphrase", "Not-Paraphrase"], [1, 0]),
        ("mrpc", ["not duplicate", "duplicate"], [0, 1]),
        ("qqp", ["equivalent", "NotEquivalent"], [1, 0]),
        ("cola", ["acceptable", "unacceptable"], [1, 0]),
        ("sst2", ["POS", "NEG"], [1, 0]),
        ("sst2", ["LABEL_0", "LABEL_1"], [0, 1]),
        ("sst2", ["1", "0"], [1, 0]),
        ("mnli", ["label-2", "label-0", "label-1"], [1, 2, 0]),
        ("stsb", ["LABEL_0"], [0]),
        ("stsb", ["similarity"], [0]),
    ],
)
def test_names_order_the_labels(task, names, rows):
    found, remark = label_rows(names, get_task(task), "DIR", "")
    assert found == rows
    by_number = names[0][-1].isdecimal() and task != "stsb"
    assert ("numbers for labels" in remark) == by_number
    assert ("another order" in remark) == (not by_number and rows != sorted(rows))
    _set_labels(config := BertConfig(), get_task(task), rows)
    assert rows_set(config, get_task(task)) == rows


@pytest.mark.parametrize(
    ("task", "names", "message"),
    [
        ("mrpc", ["negative", "positive"], "negative, positive for labels, and MRPC has not_equivalent, equivalent"),
        ("mrpc", ["equivalent", "paraphrase"], "equivalent, paraphrase for"),
        ("rte", ["entailment", "LABEL_1"], "entailment, LABEL_1 for"),
        ("rte", ["1", "2"], "1, 2 for"),
        ("rte", ["contradiction", "neutral", "entailment"], "contradiction, .* and RTE has entailment, not_entailment"),
        ("stsb", ["a", "b"], "a, b for labels, and STS-B has score"),
        ("sst2", ["LABEL_0"], "LABEL_0 for labels, and SST-2 has negative, positive"),
    ],
)
def test_other_labels_are_refused(task, names, message):
    with pytest.raises(ValueError, match=f"^DIR has {message}.*: do it$"):
        label_rows(names, get_task(task), "DIR", "do it")


@pytest.mark.parametrize(
    ("architecture", "names", "holds"),
    [
        ("BertForSequenceClassification", ["LABEL_0", "LABEL_1"], True),
        ("BertModel", ["yes", "no"], False),
        (None, ["yes", "no"], True),
        (None, ["LABEL_0", "LABEL_1"], False),
    ],
)
def test_what_holds_a_head(architecture, names, holds):
    labels = dict(enumerate(names))
    assert is_classifier(BertConfig(architectures=architecture and [architecture], id2label=labels)) is holds


@pytest.fixture
def renamed(classifier, tmp_path):
    """Gives a function that copies this classifier, with other names of its labels and rows of its head."""

    def call(names: list[str], rows: list[int]) -> Path:
        target = tmp_path / "-".join(names)
        shutil.copytree(classifier.folder, target)
        config = json.loads((target / "config.json").read_text())
        config["id2label"] = dict(enumerate(names))
        config["label2id"] = {name: number for number, name in enumerate(names)}
        (target / "config.json").write_text(json.dumps(config))
        weights = load_file(target / "model.safetensors")
        head = {name: weights[name][rows] for name in weights if name.startswith("classifier")}
        save_file(weights | head, target / "model.safetensors", {"format": "pt"})
        return target

    return call


def test_a_head_in_another_order_keeps_its_meaning(train, classifier, renamed, tmp_path, capsys):
    """Score and loss are those of the plain order, in training too, and the saved names still say what is what."""
    steps = {"max_train_steps": 10, "learning_rate": 1e-3}
    plain = train(output="plain", model_name_or_path=classifier.folder, **steps)
    capsys.readouterr()
    other = train(output="other", model_name_or_path=renamed(["Positive", "NEGATIVE"], [1, 0]), **steps)
    assert "another order than the data: negative is its output 1, positive is its output 0" in capsys.readouterr().out
    assert other["metrics"] == plain["metrics"] == {"accuracy": 1.0}
    assert other["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-4)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "other").config
    assert (saved.id2label, saved.label2id) == ({0: "positive", 1: "negative"}, {"positive": 0, "negative": 1})


def test_a_head_with_other_labels_is_refused_or_replaced(train, classifier, renamed, capsys):
    named = renamed(["cat", "dog"], [0, 1])
    with pytest.raises(ValueError, match=r"cat, dog for labels, and SST-2 has .*id2label.*--ignore_mismatched_sizes"):
        train(model_name_or_path=named)
    none = {"max_train_steps": 1, "learning_rate": 1e-12}
    kept = train(output="kept", model_name_or_path=classifier.folder, **none)
    new = train(output="new", model_name_or_path=named, flags=("ignore_mismatched_sizes",), **none)
    assert "a new head is trained" in capsys.readouterr().out
    assert kept["train_loss"] < 0.1 < new["train_loss"]
    with pytest.raises(ValueError, match="negative, positive for labels, and MNLI has"):
        train("mnli", model_name_or_path=classifier.folder)
    assert train("mnli", model_name_or_path=classifier.folder, flags=("ignore_mismatched_sizes",))["steps"] == 3


def test_a_teacher_in_another_order_teaches_the_same(train, classifier, renamed):
    student = {
        "attn_implementation": "sdpa",
        "dropout": 0,
        "max_train_steps": 1,
        "model_name_or_path": classifier.folder,
    }
    alone = train(output="alone", **student)
    student["hidden_weight"] = 0
    same = train(output="same", teacher=renamed(["positive", "negative"], [1, 0]), **student)
    assert same["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-5)
    with pytest.raises(ValueError, match=r"cat, dog for labels.*give a teacher that was fine-tuned on SST-2"):
        train(output="none", teacher=renamed(["cat", "dog"], [0, 1]), **student)
