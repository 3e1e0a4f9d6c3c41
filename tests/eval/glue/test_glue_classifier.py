"""A classifier that was fine-tuned elsewhere: its scores with exact attention and with backends, and what is said."""

import json
import shutil

import pytest
import torch
import transformers as hf

import favor
from favor.eval.glue import __main__ as glue
from favor.eval.glue.classifier import batches
from favor.models.bert import PerformerBertForSequenceClassification
from favor.train.text.glue_data import load_glue
from favor.train.text.glue_report import glue_metrics


@pytest.fixture
def classifier(bert_folder, tmp_path):
    """Gives a function that saves a BERT classifier with random weights, as any program would, with names of labels."""

    def call(names: list[str]):
        torch.manual_seed(1)
        folder, labels = tmp_path / "classifier", dict(enumerate(names))
        numbers = {name: number for number, name in labels.items()}
        model = hf.BertForSequenceClassification.from_pretrained(bert_folder, id2label=labels, label2id=numbers)
        torch.nn.init.normal_(model.classifier.weight)
        tokenizer = hf.AutoTokenizer.from_pretrained(bert_folder)
        words = tokenizer(sorted(tokenizer.get_vocab()), return_tensors="pt")
        with torch.no_grad():  # centred logits: all labels are predicted
            model.classifier.bias -= model.eval()(**words).logits.mean(0)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return call


@pytest.fixture
def evaluate(glue_folder, tmp_path):
    """Gives a function that evaluates a folder, and returns the content of its JSON file by row, and its report."""

    def call(folder, task: str, *words: str):
        where = ["--data_dir", str(glue_folder), "--output_dir", str(tmp_path), "--name", "x"]
        assert glue.main(["--model_name_or_path", str(folder), "--task_name", task, *where, *words]) == 0
        content, report = json.loads((tmp_path / "x.json").read_text()), (tmp_path / "x.md").read_text()
        return {row["attention"]: row for row in content["rows"]}, content, report

    return call


def outputs(folder, data, split="validation", backend="sdpa", **options) -> torch.Tensor:
    """The logits of the model, sample by sample, with no padding and none of the program's code."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if backend != "sdpa":
        favor.configure(model, backend, **options)
    tokenizer, columns = hf.AutoTokenizer.from_pretrained(folder), data.task.sentences
    texts = [[row[name] for name in columns] for row in data.evaluation[split]]
    with torch.no_grad():
        return torch.cat([model(**tokenizer(*own, return_tensors="pt")).logits for own in texts])


def score(logits, data, rows, split="validation") -> dict[str, float]:
    """The metrics of the task, of logits whose columns `rows` are its labels."""
    said = logits[:, 0] if data.task.is_regression else logits[:, rows].argmax(-1)
    return glue_metrics(data.task, said, data.evaluation[split]["label"][:])


def test_exact_and_switched_side_by_side(classifier, evaluate, glue_folder):
    folder, data = classifier(["Positive", "NEGATIVE"]), load_glue("sst2", glue_folder)
    few = "landmark:num_features=2,selected_keys=0"
    rows, content, report = evaluate(folder, "sst2", "--backends", few, "favor+:8", "--exact_below", "20", "0", "7")
    assert list(rows) == ["sdpa", *(f"{name}, exact_below {own}" for name in (few, "favor+:8") for own in (20, 0, 7))]
    exact = outputs(folder, data)
    assert rows["sdpa"]["metrics"] == score(exact, data, [1, 0]) != score(exact, data, [0, 1])
    assert content["labels"] == {"negative": 1, "positive": 0}
    assert f"- Labels: {folder.name} has the labels in another order than the data" in report
    lengths = [len(text.split()) + 2 for text in data.evaluation["validation"]["sentence"][:]]
    landmarks = {"num_features": 2, "selected_keys": 0}
    options = {few: ("landmark", landmarks), "favor+:8": ("favor+", {"num_features": 8})}
    for name, (backend, own) in options.items():
        always, never, some = (rows[f"{name}, exact_below {bound}"] for bound in (20, 0, 7))
        assert (always["exact_samples"], never["exact_samples"]) == (1, 0)
        assert always["largest_logit_change"] < 1e-5 < never["largest_logit_change"]
        switched = outputs(folder, data, backend=backend, exact_below=0, **own)
        assert never["metrics"] == score(switched, data, [1, 0])
        assert never["largest_logit_change"] == pytest.approx((switched - exact).abs().max().item(), abs=1e-4)
        changed = (switched.argmax(-1) != exact.argmax(-1)).float().mean().item()
        assert never["changed"] == pytest.approx(changed)
        short = torch.tensor([length < 7 for length in lengths])
        assert some["exact_samples"] == int(short.sum()) / 12
        assert some["metrics"] == score(torch.where(short[:, None], exact, switched), data, [1, 0])
        assert never["options"]["num_features"] == own["num_features"]
        assert f"`{name}, exact_below 20` runs exact attention on ALL samples" in report
        assert f"`{name}, exact_below 7` runs exact attention on {int(short.sum())} of 12 samples" in report
        assert f"| `{name}, exact_below 0` | 0 |" in report
    assert "Tokens of a sample: " in report


def test_both_halves_of_mnli(classifier, evaluate, glue_folder):
    folder, data = classifier(["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]), load_glue("mnli", glue_folder)
    rows, content, report = evaluate(folder, "mnli", "--exact_below", "auto", "0")
    assert [row["exact_samples"] for row in rows.values()] == [1, 1, 0]
    assert "fewer keys than exact_below = 2560" in report
    assert "no fewer means or selected keys than ALL of 10 samples have tokens (up to 768)" in report
    halves = [score(outputs(folder, data, split), data, [2, 1, 0], split)["accuracy"] for split in data.evaluation]
    assert rows["sdpa"]["metrics"] == dict(zip(("accuracy", "accuracy_mismatched"), halves, strict=True))
    assert content["samples"] == {"validation_matched": 5, "validation_mismatched": 5}


def test_one_half_of_mnli_is_told_of(classifier, evaluate, glue_folder, tmp_path):
    shutil.copytree(glue_folder / "MNLI", tmp_path / "MNLI")
    for name in ("dev_mismatched.tsv", "train.tsv"):  # nor is the training set read
        (tmp_path / "MNLI" / name).unlink()
    few = ["--data_dir", str(tmp_path), "--max_eval_samples", "4", "--max_length", "6"]
    rows, _, report = evaluate(classifier(["LABEL_0", "LABEL_1", "LABEL_2"]), "mnli", *few)
    assert list(rows["sdpa"]["metrics"]) == ["accuracy"]
    for said in (
        "4 reach max_length = 6",
        "Not there, so not evaluated: validation_mismatched",
        "samples: validation_matched 4, the first ones",
        "LABEL_0, LABEL_1, LABEL_2: they are taken as those of MNLI, 0 entailment, 1 neutral",
    ):
        assert said in report


def test_scores_of_a_decoder_without_padding_token(bert_folder, evaluate, glue_folder, tmp_path):
    folder, data = tmp_path / "gpt2", load_glue("stsb", glue_folder)
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=19, n_embd=16, n_layer=1, n_head=2, num_labels=1, initializer_range=0.2)
    hf.GPT2ForSequenceClassification(config).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(bert_folder).save_pretrained(folder)
    rows, _, report = evaluate(folder, "stsb", "--backends", "favor+:8", "--exact_below", "0")
    options = {"backend": "favor+", "num_features": 8, "exact_below": 0}
    exact, switched = (outputs(folder, data, **own) for own in ({}, options))
    for row, logits in (("sdpa", exact), ("favor+:8, exact_below 0", switched)):
        assert rows[row]["metrics"] == pytest.approx(score(logits, data, None), abs=1e-6)
    change = (switched - exact).abs().mean().item()
    assert rows["favor+:8, exact_below 0"]["changed"] == pytest.approx(change, abs=1e-6)
    assert "mean change of a score" in report


@pytest.mark.parametrize("kind", [hf.AutoModelForSequenceClassification, PerformerBertForSequenceClassification])
def test_a_saved_backend_is_the_default_and_keeps_its_options(kind, classifier, evaluate, tmp_path):
    model = kind.from_pretrained(classifier(["negative", "positive"]))
    folder, options = tmp_path / "switched", {"features": "sderf", "num_features": 6, "exact_below": 0}
    favor.configure(model, "favor#", **options).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(tmp_path / "classifier").save_pretrained(folder)
    rows, _, _ = evaluate(folder, "sst2")
    assert list(rows) == ["sdpa", "favor#"]
    assert {name: rows["favor#"]["options"][name] for name in options} == options
    assert rows["favor#"]["largest_logit_change"] > 1e-4
    rows, _, _ = evaluate(folder, "sst2", "--backends", "landmark")
    assert rows["landmark"]["options"]["num_features"] == 256


def test_batches_never_mix_samples_that_are_exact_and_those_that_are_not():
    assert batches([5, 2, 9, 4, 3, 8], 5, 2) == [[1, 4], [3], [0, 5], [2]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task_name", "sst2"], "cat, dog for labels, and SST-2 has negative, positive: .*--label_names"),
        (["--task_name", "sst2", "--label_names", "pos"], "one name for each of the 2 outputs, got 1"),
        (["--task_name", "stsb"], "cat, dog for labels, and STS-B has score"),
        (["--task_name", "mprc"], "unknown GLUE task 'mprc'"),
        (["--task_name", "sst2", "--seeds", "1", "--adapted", "DIR"], "--adapted, --seeds would have no effect"),
        (["--task_name", "sst2", "--exact_below", "no"], "--exact_below must be a number of tokens or auto, got 'no'"),
        (["--task_name", "sst2", "--max_length", "0"], "--max_length .* must be at least 1"),
        (["--task_name", "sst2", "--max_length", "500"], "max_length is 500, but the model has 128 positions"),
        (["--task_name", "sst2", "--backends", "favr"], "a backend must be one of"),
        (["--task_name", "sst2", "--backends", "favor+:selected_keys=8"], "does not read selected_keys"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(words, message, classifier, glue_folder, tmp_path):
    right = [] if "SST-2 has" in message else ["--label_names", "NEG", "POS"]
    words = [*(right if "--label_names" not in words and "stsb" not in words else []), *words]
    where = ["--data_dir", str(glue_folder), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=message):
        glue.main(["--model_name_or_path", str(classifier(["cat", "dog"])), *where, *words])


def test_other_models_options_and_texts_are_refused(bert_folder, glue_folder, classifier, tmp_path, capsys):
    with pytest.raises(ValueError, match="which holds a BertModel: favor train glue fine-tunes one"):
        glue.main(["--model_name_or_path", str(bert_folder), "--task_name", "sst2", "--data_dir", str(glue_folder)])
    with pytest.raises(ValueError, match="name it by --model_name_or_path"):
        glue.main(["--task-name=sst2"])
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nzz\t0\ngood\t1\n")
    words = ["--model_name_or_path", str(classifier(["negative", "positive"])), "--output_dir", str(tmp_path / "out")]
    words += ["--task_name", "sst2", "--data_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=r"50% of the tokens of the samples of SST-2"):
        glue.main(words)
    with pytest.raises(SystemExit):
        glue.main([*words, "--learning_rate", "1"])
    assert "unknown option --learning_rate" in capsys.readouterr().err
