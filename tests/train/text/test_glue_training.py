"""The training program called in this process: results, errors, seeds, resuming."""

import json
import math
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from stopping import redrawing, same_weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DistilBertConfig
from transformers import DistilBertForSequenceClassification as DistilBert

from favor.models.bert import PerformerBertForSequenceClassification
from favor.train import glue
from favor.train.common import checkpoint, loop
from favor.train.common.teacher import logits_loss
from favor.train.text import glue_report
from favor.train.text.glue_data import GlueData, load_glue


def score_again(folder: Path, data: GlueData, split: str = "validation") -> dict[str, float]:
    """The saved model's metric, computed here sample by sample, with no padding and none of the program's code."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = []
    for row in data.evaluation[split]:
        with torch.no_grad():
            logits = model(**tokenizer(*(row[name] for name in data.task.sentences), return_tensors="pt")).logits[0]
        said.append(logits.item() if data.task.is_regression else logits.argmax().item())
    return glue_report.glue_metrics(data.task, said, data.evaluation[split]["label"][:])


def test_learns_a_learnable_task_and_says_so_everywhere(classifier, glue_folder):
    written = json.loads((classifier.folder / "all_results.json").read_text())
    assert classifier.results == written
    assert written["metrics"]["accuracy"] == 1.0
    assert written["baseline"]["accuracy"] == 0.5
    assert written["metrics"] == score_again(classifier.folder, load_glue("sst2", glue_folder))
    assert (written["steps"], written["seeds"], written["metrics_std"]) == (60, [42], {"accuracy": None})
    assert written["favor"]["num_features"] == 16
    assert written["seconds_per_step"] > 0
    assert written["peak_memory_bytes"] > 1e7
    assert "majority baseline accuracy 0.5000" in classifier.printed
    card = (classifier.folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    (measured,) = head["model-index"][0]["results"]
    data = {"name": "GLUE SST-2", "type": "nyu-mll/glue", "config": "sst2", "split": "validation"}
    assert measured["dataset"] == data
    assert measured["metrics"][0] == {"type": "accuracy", "value": 1.0, "name": "accuracy"}
    for text in ("`favor+`", "num_features 16", "exact_below 0", "Seeds: 42", f"torch {version('torch')}"):
        assert text in card
    assert str(classifier.folder.parent) not in card
    assert head["license"] == "unknown"  # the base model has no card that says it
    assert "one seed" in card


BACKEND = {"attn_implementation": "favor+", "num_features": 8, "exact_below": 0}


@pytest.fixture
def example(tmp_path, capsys, monkeypatch):
    """Runs the example of the model card of a run, and the same line where the program printed it."""

    def call(printed: str) -> str:
        monkeypatch.chdir(tmp_path)
        exec((tmp_path / "run" / "README.md").read_text().split("```python\n")[1].split("```")[0], {})
        (line,) = re.findall("load it, after import favor, with (.*)", printed)
        assert eval(line, {"AutoModelForSequenceClassification": AutoModelForSequenceClassification}).config.favor
        return capsys.readouterr().out.strip()

    return call


def test_regression_and_the_example_of_its_card(train, bert_folder, glue_folder, tmp_path, example, capsys):
    shutil.copytree(bert_folder, tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    options = {"weight_decay": 0.1, "lr_scheduler_type": "cosine", **BACKEND}
    results = train("stsb", model_name_or_path=tmp_path / "base", **options)
    printed = capsys.readouterr().out
    assert "pearson 0.0000, spearmanr 0.0000" in printed
    assert set(results["metrics"]) == {"pearson", "spearmanr"}
    again = score_again(tmp_path / "run", load_glue("stsb", glue_folder))
    assert results["metrics"]["pearson"] == pytest.approx(again["pearson"], abs=2e-3)
    assert yaml.safe_load((tmp_path / "run" / "README.md").read_text().split("---")[1])["license"] == "mit"
    assert re.fullmatch(r"-?\d+\.\d+", example(printed))


def test_both_halves_of_mnli_are_trained_and_evaluated_with_distractors(train, tmp_path, glue_folder, example, capsys):
    results = train("mnli", distractors=2, **BACKEND)
    printed, data = capsys.readouterr().out, load_glue("mnli", glue_folder)
    data.add_distractors(2)
    for name, split in (("accuracy", "validation_matched"), ("accuracy_mismatched", "validation_mismatched")):
        assert results["metrics"][name] == score_again(tmp_path / "run", data, split)["accuracy"]
    assert results["eval_samples"] == {"validation_matched": 5, "validation_mismatched": 5}
    assert example(printed) in ("entailment", "neutral", "contradiction")
    assert "cut off" not in printed
    train("mnli", "cut off", distractors=2, max_length=12)
    assert re.search(r"(\d+) of \1 documents .* --max_length above 12", capsys.readouterr().out)


def test_bert_with_a_favor_backend_is_saved_as_performer_bert_and_fine_tuned_with_it(train, tmp_path):
    options = {"features": "aderf", "num_features": 8, "exact_below": 0, "seed": 7}
    train(attn_implementation="favor#", dropout=0.25, **options)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert type(model) is PerformerBertForSequenceClassification
    assert model.config._attn_implementation == "favor#"
    assert {name: model.config.favor[name] for name in options} == options
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert (model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) == (0.25, 0.25)
    results = train(output="again", model_name_or_path=tmp_path / "run", num_features=6)
    assert (results["attn_implementation"], results["favor"]["num_features"]) == ("favor#", 6)


def test_baseline_is_the_training_majority(tmp_path):
    labels = {"train": "1 1 0", "dev": "1 0 0 0"}
    for split, values in labels.items():
        rows = [f"{i}\t1\t2\ta\tb\t{label}" for i, label in enumerate(values.split())]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["id\tq1\tq2\tquestion1\tquestion2\tis_duplicate", *rows]))
    data = load_glue("qqp", tmp_path)
    # Of four development samples one is of class 1: accuracy 1/4, precision 1/4, recall 1.
    assert glue_report.baseline(data) == {"accuracy": 0.25, "f1": pytest.approx(0.4)}


def test_constant_predictions_are_warned_of(train, tmp_path, capsys):
    results = train(learning_rate=1e-12)
    assert results["constant_prediction_seeds"] == [42]
    assert "WARNING: seed 42 predicts the same for every sample" in capsys.readouterr().out
    assert "seed 42 ends in constant predictions" in (tmp_path / "run" / "README.md").read_text()


def test_several_seeds_give_mean_and_sample_deviation_and_are_not_trained_again(train, tmp_path, monkeypatch):
    together = train("stsb", seed="3 4", **BACKEND)
    alone = train("stsb", output="alone", seed=4, **BACKEND)
    first, second = (run["metrics"]["pearson"] for run in together["per_seed"])
    assert first != second == alone["metrics"]["pearson"]
    assert together["metrics"]["pearson"] == pytest.approx((first + second) / 2)
    assert together["metrics_std"]["pearson"] == pytest.approx(abs(first - second) / math.sqrt(2))
    assert same_weights(tmp_path / "run" / "seed_4", tmp_path / "alone")
    assert json.loads((tmp_path / "run" / "all_results.json").read_text()) == together
    trained, original = [], glue._train_seed
    monkeypatch.setattr(glue, "_train_seed", lambda *args: trained.append(args[2]) or original(*args))
    again = train("stsb", seed="3 4 5", flags=("resume",), **BACKEND)
    assert trained == [5]
    assert again["per_seed"][:2] == together["per_seed"]
    assert again["seeds"] == [3, 4, 5]


def test_resume_repeats_the_uninterrupted_run(train, bert_folder, tmp_path, monkeypatch):
    """Within an epoch, after it, and where only the results are not written; a teacher gives scores to learn from."""
    # 40 samples in batches of 3, 3 batches a step: 5 steps an epoch, the last one of two batches.
    settings = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 3, "warmup_ratio": 0.15}
    settings |= {"model_name_or_path": redrawing(bert_folder, tmp_path / "redrawing", 3)}
    settings |= {"max_train_steps": 8, "checkpointing_steps": 2, **BACKEND}
    train("stsb", "teacher")
    settings |= {"teacher": tmp_path / "teacher"}
    whole = train("stsb", "whole", flags=("group_by_length",), **settings)
    assert [entry["step"] for entry in whole["per_seed"][0]["history"]] == [5, 8]
    original = checkpoint.Progress.__setattr__
    for stop in (5, 6, 8):
        output = f"stopped at {stop}"

        def stop_at(self, name, value, stop=stop):
            if name == "step" and value > stop:
                raise KeyboardInterrupt
            original(self, name, value)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.Progress, "__setattr__", stop_at)
            if stop == 8:
                patch.setattr(glue, "_write_results", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train("stsb", output, flags=("group_by_length",), **settings)
        assert not (tmp_path / output / "all_results.json").exists()
        resumed = train("stsb", output, flags=("resume", "group_by_length"), **settings)
        assert same_weights(tmp_path / "whole", tmp_path / output)
        assert resumed["per_seed"][0]["history"] == whole["per_seed"][0]["history"]
        assert resumed["train_loss"] == whole["train_loss"]


def test_a_folder_with_a_run_is_not_written_over_by_accident(train):
    first = train(flags=("resume",))  # without a checkpoint it starts from the beginning
    assert first["steps"] == 3
    with pytest.raises(ValueError, match=r"holds a run already: .*--resume.*--overwrite_output_dir"):
        train()
    with pytest.raises(ValueError, match=r"cannot resume .*learning_rate was 5e-05 and is 0\.001"):
        train(flags=("resume",), learning_rate=1e-3)
    with pytest.raises(ValueError, match="set one of them"):
        train(flags=("resume", "overwrite_output_dir"))
    assert train(flags=("resume",))["per_seed"] == first["per_seed"]
    with pytest.raises(ValueError, match="holds a run already"):
        train(seed="1 2")
    assert train(flags=("overwrite_output_dir",), max_train_steps=2)["steps"] == 2


def test_epochs_steps_and_accumulation(train, monkeypatch):
    # 40 samples, batches of 4, 3 of them a step: 4 steps an epoch, the last one of a single batch.
    seeds, original = [], glue.load_model

    def noting_seeds(*args):
        model = original(*args)
        model.register_forward_pre_hook(lambda *_: seeds.append(torch.initial_seed()) if model.training else None)
        return model

    monkeypatch.setattr(glue, "load_model", noting_seeds)
    results = train(max_train_steps=None, num_train_epochs=1.5, gradient_accumulation_steps=3)
    assert results["steps"] == 6
    assert [entry["step"] for entry in results["per_seed"][0]["history"]] == [4, 6]
    assert len(set(seeds)) == len(seeds) == 10 + 6  # each batch has dropout of its own


def test_mixed_precision_and_warmup(train, monkeypatch):
    rates, original = [], loop.train_epoch

    def noting(run, bar):
        step = run.scheduler.step
        run.scheduler.step = lambda: rates.append(run.scheduler.get_last_lr()[0]) or step()
        original(run, bar)

    monkeypatch.setattr(loop, "train_epoch", noting)
    assert train(mixed_precision="bf16", warmup_ratio=0.5)["mixed_precision"] == "bf16"
    assert rates == pytest.approx([0.0, 2.5e-5, 5e-5])


def test_errors_say_what_to_do(train, bert_folder):
    for values, message in (
        ({"learning_rate": 0}, "learning_rate must be greater than 0, got 0.0"),
        ({"distractors": -1}, "distractors must be at least 0, got -1"),
        ({"max_length": 1000}, "max_length is 1000, but the model has 128 positions"),
        ({"exact_below": "short"}, "exact_below must be a number of tokens or auto, got 'short'"),
        ({"attn_implementation": "favor+", "num_features": 0}, "num_features"),
        ({"attn_implementation": "favor+", "features": "sderf"}, "features is an option of favor#, not of favor+"),
        ({"num_features": 8}, "num_features: options of FAVOR attention, so add --attn_implementation"),
        ({"seed": "1 1"}, "numbers of seed must be different"),
        ({"mixed_precision": "int8"}, "mixed_precision must be one of"),
        ({"dropout": 1}, "dropout must be at least 0 and less than 1, got 1.0"),
        ({"lr_scheduler_type": "cosin"}, "got 'cosin': did you mean cosine"),
        ({"learning_rate": 1e30, "max_train_steps": 20}, "lower the learning rate"),
        ({"teacher": bert_folder}, "expected a teacher that was fine-tuned on SST-2; .* holds a BertModel"),
        (
            {"teacher": bert_folder, "logits_weight": 0, "hidden_weight": 0},
            "both 0, so nothing is learned from",
        ),
        ({"hidden_weight": 2}, "hidden_weight needs a teacher: add --teacher DIR"),
    ):
        with pytest.raises((ValueError, FloatingPointError), match=message):
            train(**values)


def test_pickled_weights_need_to_be_allowed(train, bert_folder, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(bert_folder, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--trust_remote_code"):
        train(model_name_or_path=folder)
    assert train(model_name_or_path=folder, flags=("trust_remote_code",))["steps"] == 3


def test_another_architecture(train, bert_folder, tmp_path):
    config = DistilBertConfig(vocab_size=19, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=128)
    DistilBert(config).save_pretrained(tmp_path / "distil")
    AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path / "distil")
    results = train(model_name_or_path=tmp_path / "distil", **BACKEND)
    assert (results["model_type"], results["favor"]["num_features"]) == ("distilbert", 8)
    assert 'attn_implementation="favor+"' in (tmp_path / "run" / "README.md").read_text()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run", attn_implementation="favor+")
    assert saved.config.favor["num_features"] == 8


def test_a_teacher_is_learned_from(train, classifier, tmp_path, glue_folder):
    """The predictions come close to the teacher's."""
    options = {"teacher": classifier.folder, "logits_weight": 10, "learning_rate": 1e-2, **BACKEND}
    for steps in ("1", "20"):
        train(output=steps, max_train_steps=steps, **options)
    sentences = load_glue("sst2", glue_folder).train["sentence"][:]
    inputs = AutoTokenizer.from_pretrained(classifier.folder)(sentences, return_tensors="pt", padding=True)
    folders = (classifier.folder, tmp_path / "1", tmp_path / "20")
    models = (AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in folders)
    with torch.no_grad():
        goal, before, after = (model(**inputs).logits for model in models)
    assert logits_loss(after, goal, None) < 0.5 * logits_loss(before, goal, None)
