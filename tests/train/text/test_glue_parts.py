"""GLUE: its TSV files, labels of a checkpoint, the output layer's own optimizer, and the program as users start it."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from launching import LAUNCH, TWO, fork, kill_after, options, run
from safetensors.torch import load_file, save_file
from stopping import redrawing, same_weights
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

import favor.models  # noqa: F401  registers Performer BERT
from favor.optim import CombinedOptimizer, SoftmaxBound
from favor.train import glue
from favor.train.common.arguments import DataArguments, HeadArguments, TrainArguments
from favor.train.common.pretrained import make_optimizer
from favor.train.text.glue_data import TASKS, GlueData, get_task, load_glue
from favor.train.text.glue_models import _set_labels, is_classifier, label_rows, make_loaders, rows_set
from favor.train.text.glue_report import glue_metrics
from favor_command.saved import load_processor

# One row a task, as the official files have it, and what the hub's dataset holds for it: the texts and the label.
PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
MNLI = f"index\tpromptID\tpairID\tgenre\t{PARSES}\tsentence1\tsentence2\tlabel1\tgold_label"
MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
RTE = "index\tsentence1\tsentence2\tlabel"
LAYOUTS = {
    "cola": (None, "gj04\t0\t*\tThey drank the pub.", "They drank the pub.", 0),
    "sst2": ("sentence\tlabel", "no wit , only gags \t0", "no wit , only gags ", 0),
    "mrpc": (MRPC, '1\t70\t71\tHe " no .\tHe no .', 'He " no .', "He no .", 1),
    "stsb": (STSB, "0\tmain\tMSR\t2012\t0001\tnone\tnone\tOne.\tTwo.\t4.750", "One.", "Two.", 4.75),
    "qqp": (QQP, "133273\t213221\t213222\tWhy?\tWhy not?\t1", "Why?", "Why not?", 1),
    "mnli": (MNLI, "0\t31\t31n\tgov\t(\t(\t(ROOT\t(ROOT\tCream.\tMilk.\tentailment\tneutral", "Cream.", "Milk.", 1),
    "qnli": ("index\tquestion\tsentence\tlabel", "0\tWhen?\tNever.\tnot_entailment", "When?", "Never.", 1),
    "rte": (RTE, "0\tIt rains.\tIt is wet.\tentailment", "It rains.", "It is wet.", 0),
    "wnli": (RTE, "0\tI stuck a pin.\tThe pin stuck.\t1", "I stuck a pin.", "The pin stuck.", 1),
}


def write(folder, files: dict[str, str]):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        content = text.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def rte(*rows: str) -> str:
    return "\n".join([RTE, *rows]) + "\n"


GOOD = rte("0\ta\tb\tentailment", "1\tc\td\tnot_entailment")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_official_layout(name, end, tmp_path):
    header, row, *values = LAYOUTS[name]
    expected = dict(zip((*TASKS[name].sentences, "label"), values, strict=True))
    text = end.join([*([header] if header else []), row, row]) + end
    dev = "dev_matched.tsv.gz" if name == "mnli" else "dev.tsv.gz"
    write(tmp_path / TASKS[name].folder, {"train.tsv": text, dev: text})
    data = load_glue(name, tmp_path)
    (evaluation,) = data.evaluation.values()
    assert data.train.to_list() == [expected, expected] == evaluation.to_list()
    assert data.sources["train"] == f"{TASKS[name].folder}/train.tsv"


def test_task_folder_itself_and_plain_before_gzip_before_sample(tmp_path):
    sample = write(tmp_path, {"train.sub3.tsv.gz": rte("0\tsample\tb\tentailment"), "dev.tsv": GOOD})
    assert load_glue("rte", sample).train[0]["sentence1"] == "sample"
    assert load_glue("rte", sample).sources["train"] == "RTE/train.sub3.tsv.gz"
    write(tmp_path, {"train.tsv.gz": rte("0\tzipped\tb\tentailment")})
    assert load_glue("rte", sample).train[0]["sentence1"] == "zipped"
    write(tmp_path, {"train.tsv": rte("0\tplain\tb\tentailment")})
    assert load_glue("rte", sample).train[0]["sentence1"] == "plain"


def test_quotes_odd_line_ends_and_empty_sentences_stay_and_blank_lines_at_the_end_are_no_rows(tmp_path):
    odd = '"start\x85 a\u2028b\x0c"'
    write(tmp_path, {"train.tsv": rte(f"0\t{odd}\t\tentailment") + "\n\r\n", "dev.tsv": GOOD})
    (row,) = load_glue("rte", tmp_path).train
    assert (row["sentence1"], row["sentence2"]) == (odd, "")


def test_malformed_row_names_file_and_line(tmp_path):
    for row, reason in (
        ("1\tc\tnot_entailment", "expected 4 fields, got 3"),
        ("1\tc\td\te\tnot_entailment", "expected 4 fields, got 5"),
        ("1\tc\td\tneutral", "expected a label of entailment, not_entailment, got 'neutral'"),
        ("1\tc\td\t1", "got '1'"),
        ("", "expected 4 fields, got 1"),
        ("1\tc\0\td\tnot_entailment", "expected UTF-8 text without NUL"),
    ):
        good = "0\ta\tb\tentailment"
        write(tmp_path, {"train.tsv": GOOD, "dev.tsv.gz": rte(good, good, row, good)})
        with pytest.raises(ValueError, match=rf"dev\.tsv\.gz:4: .*{reason}"):
            load_glue("rte", tmp_path)
    for score in ("5.001", "-0.1", "nan", "inf", "high", ""):
        with pytest.raises(ValueError, match="expected a score between 0 and 5"):
            get_task("stsb").parse_label(score)


def test_unusable_file(tmp_path):
    for name, content, message in (
        ("train.tsv", b"", "expected columns sentence1, sentence2, label in the header, got nothing"),
        ("train.tsv", b"index\tsentence1\tlabel\n", "got index, sentence1, label"),
        ("train.tsv", rte().encode(), "expected rows"),
        ("train.tsv", b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tb\tentailment\n", "UTF-8"),
        ("train.tsv.gz", gzip.compress(GOOD.encode(), mtime=0)[:30], "cannot be read"),
        ("train.tsv.gz", GOOD.encode(), "cannot be read"),
    ):
        write(tmp_path, {"dev.tsv": GOOD})
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}.*{message}"):
            load_glue("rte", tmp_path)
        (tmp_path / name).unlink()


def test_what_is_missing_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "RTE", {"train.tsv": GOOD, "notes.txt": ""})
    for name, folder, message in (
        ("mprc", "", r"unknown GLUE task 'mprc'.*cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"),
        ("rte", "nowhere", "data_dir must be an existing folder"),
        ("rte", "empty", r"no \.tsv or \.tsv\.gz file for rte in .*RTE"),
        ("rte", "", r"dev\.tsv, dev\.tsv\.gz, .*which holds notes\.txt, train\.tsv"),
    ):
        with pytest.raises(ValueError, match=message):
            load_glue(name, tmp_path / folder)


def test_hub_splits_and_what_to_do_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ValueError, match=r"nyu-mll/glue from the hub .* set data_dir"):
        load_glue("rte")
    asked = []
    names = ("train", "validation_matched", "validation_mismatched", "test_matched")
    hub = {name: Dataset.from_dict({"premise": [name], "hypothesis": ["h"], "label": [0]}) for name in names}
    monkeypatch.setattr("favor.train.text.glue_data.load_dataset", lambda *names: asked.append(names) or hub)
    data = load_glue("mnli")
    assert asked == [("nyu-mll/glue", "mnli")]
    assert data.train["premise"][:] == ["train"]
    assert list(data.evaluation) == ["validation_matched", "validation_mismatched"]
    assert data.sources["train"] == "nyu-mll/glue mnli"


def test_distractors_surround_the_text_that_holds_the_answer(tmp_path):
    texts = [f"text{i}" for i in range(20)]
    rows = [f"{i}\t{text}\thypothesis{i}\tentailment" for i, text in enumerate(texts)]
    folder = write(tmp_path, {"train.tsv": rte(*rows), "dev.tsv": rte(*rows[:2])})
    data, plain, again = (load_glue("rte", folder) for _ in range(3))
    data.add_distractors(3)
    again.add_distractors(3)
    assert data.train[:] == again.train[:]
    documents = [document.split() for document in data.train["sentence1"][:]]
    assert all(len(document) == 4 and set(document) <= set(texts) for document in documents)
    assert all(document.count(own) == 1 for own, document in zip(texts, documents, strict=True))
    assert {document.index(own) for own, document in zip(texts, documents, strict=True)} == {0, 1, 2, 3}
    assert sorted(data.evaluation["validation"]["sentence1"][1].split()) == ["text0"] * 3 + ["text1"]
    for name in ("sentence2", "label"):
        assert data.train[name][:] == plain.train[name][:]


def test_distractors_that_cannot_be(tmp_path, glue_folder):
    data = load_glue("sst2", glue_folder)
    before = data.train["sentence"][:3]
    data.keep_first(3, 1000)
    data.add_distractors(0)
    assert data.train["sentence"][:] == before
    assert data.evaluation["validation"].num_rows == 12
    with pytest.raises(ValueError, match="change the labels of sst2; tasks that have them: mnli, qnli, rte"):
        data.add_distractors(1)
    alone = rte("0\ta\tb\tentailment")
    data = load_glue("rte", write(tmp_path, {"train.tsv": alone, "dev.tsv": alone}))
    with pytest.raises(ValueError, match="the split has 1"):
        data.add_distractors(1)


def test_the_samples_to_train_must_be_known(bert_folder):
    """All of them together: the few of a development set may well be of rare words."""

    def load(train):
        splits = [Dataset.from_dict({"sentence": texts, "label": [0] * len(texts)}) for texts in (train, ["zz"])]
        data = GlueData(get_task("sst2"), splits[0], {"validation": splits[1]}, {})
        arguments = DataArguments(task_name="sst2"), TrainArguments(output_dir=""), 0, None, [0, 1]
        make_loaders(data, load_processor(str(bert_folder)), *arguments)

    load(["good film"])
    with pytest.raises(ValueError, match=r"50% of the tokens of the samples of SST-2"):
        load(["good film"] * 1000 + ["zz"] * 2000)


def test_names_order_the_labels():
    for task, names, rows in (
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
    ):
        found, remark = label_rows(names, get_task(task), "DIR", "")
        assert found == rows
        by_number = names[0][-1].isdecimal() and task != "stsb"
        assert ("numbers for labels" in remark) == by_number
        assert ("another order" in remark) == (not by_number and rows != sorted(rows))
        _set_labels(config := BertConfig(), get_task(task), rows)
        assert rows_set(config, get_task(task)) == rows


def test_other_labels_are_refused():
    for task, names, message in (
        ("mrpc", ["negative", "positive"], "negative, positive for labels, and MRPC has not_equivalent, equivalent"),
        ("mrpc", ["equivalent", "paraphrase"], "equivalent, paraphrase for"),
        ("rte", ["entailment", "LABEL_1"], "entailment, LABEL_1 for"),
        ("rte", ["1", "2"], "1, 2 for"),
        ("rte", ["contradiction", "neutral", "entailment"], "contradiction, .* and RTE has entailment, not_entailment"),
        ("stsb", ["a", "b"], "a, b for labels, and STS-B has score"),
        ("sst2", ["LABEL_0"], "LABEL_0 for labels, and SST-2 has negative, positive"),
    ):
        with pytest.raises(ValueError, match=f"^DIR has {message}.*: do it$"):
            label_rows(names, get_task(task), "DIR", "do it")


def test_what_holds_a_head():
    plain, own = {0: "LABEL_0", 1: "LABEL_1"}, {0: "yes", 1: "no"}
    assert is_classifier(BertConfig(architectures=["BertForSequenceClassification"], id2label=plain))
    assert is_classifier(BertConfig(id2label=own))
    assert not is_classifier(BertConfig(architectures=["BertModel"], id2label=own))
    assert not is_classifier(BertConfig(id2label=plain))


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
    student = {"attn_implementation": "sdpa", "dropout": 0, "max_train_steps": 1}
    student |= {"model_name_or_path": classifier.folder}
    alone = train(output="alone", **student)
    student["hidden_weight"] = 0
    same = train(output="same", teacher=renamed(["positive", "negative"], [1, 0]), **student)
    assert same["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-5)
    with pytest.raises(ValueError, match=r"cat, dog for labels.*give a teacher that was fine-tuned on SST-2"):
        train(output="none", teacher=renamed(["cat", "dog"], [0, 1]), **student)


BOUND = {"head_optimizer": "softmax_bound"}


def optimizer_of(model, **options):
    return make_optimizer(model, TrainArguments(output_dir="o"), HeadArguments(**options), 2)


def test_every_parameter_has_one_optimizer_and_options_arrive(bert_folder):
    model = AutoModelForSequenceClassification.from_pretrained(bert_folder)
    optimizer, clipped = optimizer_of(model, **BOUND, head_learning_rate=0.5)
    assert isinstance(optimizer, CombinedOptimizer)
    _, head = optimizer.optimizers
    assert isinstance(head, SoftmaxBound)
    group = head.param_groups[0]
    assert group["lr"] == 0.5
    assert {id(p) for p in group["params"]} == {id(p) for p in model.classifier.parameters()}
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))
    assert not {id(p) for p in clipped} & {id(p) for p in model.classifier.parameters()}
    optimizer, clipped = optimizer_of(model, head_learning_rate=0.5)  # AdamW
    assert [group["lr"] for group in optimizer.param_groups] == [5e-5, 5e-5, 0.5, 0.5]
    names = dict(model.named_parameters())
    assert len(clipped) == len(names)
    decayed, spared = optimizer_of(model)[0].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    vectors = [own for name, own in names.items() if name.endswith("bias") or "LayerNorm" in name]
    assert {id(p) for p in spared["params"]} == {id(p) for p in vectors}
    assert len(decayed["params"]) + len(vectors) == len(names)


def test_it_learns_with_its_defaults(train):
    with pytest.raises(ValueError, match="is for a softmax, and this task is a regression"):
        train("stsb", **BOUND)
    # The words good and bad decide, and the body hardly moves: what is learnt, the head learns.
    settings = {"max_train_steps": 60, "learning_rate": 1e-4}
    bound, adamw = train(output="bound", **settings, **BOUND), train(output="adamw", **settings)
    assert bound["metrics"]["accuracy"] > 0.6
    assert bound["train_loss"] < adamw["train_loss"] - 0.02


@pytest.mark.parametrize("head", [{}, BOUND], ids=["AdamW", "SoftmaxBound"])
def test_accumulated_steps_are_those_of_large_batches(head, train, still_folder, tmp_path):
    """Without dropout, and with sizes that divide, two batches of 4 are one of 8."""
    common = {"model_name_or_path": still_folder, **head}
    train(output="two", gradient_accumulation_steps=2, **common)
    train(output="one", per_device_train_batch_size=8, **common)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    for name in first:
        # Attention does not change with a key's bias: its gradient is rounding noise, which Adam blows up.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_bits(bert_folder, glue_folder, tmp_path):
    model, killed = redrawing(bert_folder, tmp_path / "redrawing", 7), tmp_path / "killed"
    given = {"attn_implementation": "favor+", "num_features": 8, "exact_below": 0, "task_name": "sst2", **BOUND}
    given |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "checkpointing_steps": 5}
    given |= {"model_name_or_path": model, "data_dir": glue_folder, "max_train_steps": 30}
    program, words = "favor.train.glue", options(given | {"output_dir": killed})
    fork(program, *options(given | {"output_dir": tmp_path / "whole"}))
    kill_after(5, killed, program, *words)
    assert "continuing from checkpoint-" in fork(program, *words, "--resume")
    assert same_weights(tmp_path / "whole", killed)
    first, second = (json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("whole", "killed"))
    assert first["metrics"] == second["metrics"]
    assert first["per_seed"][0]["history"] == second["per_seed"][0]["history"]


@pytest.mark.slow
def test_two_processes_evaluate_every_sample_once_and_resume(bert_folder, glue_folder, tmp_path):
    # 13 samples in batches of 2 x 2: the last round has one sample for two processes.
    given = {"model_name_or_path": bert_folder, "data_dir": glue_folder, "output_dir": tmp_path / "two"}
    given |= {"task_name": "stsb", "per_device_eval_batch_size": 2, "per_device_train_batch_size": 3}
    words = options(given | {"num_train_epochs": 1, "checkpointing_steps": 3, "learning_rate": 1e-2})
    printed = run(*LAUNCH, *TWO, glue.__file__, *words)
    assert printed.count("majority baseline") == 1
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())
    assert results["num_processes"] == 2
    # 40 samples, 3 a process.
    assert results["steps"] == 7
    assert [path.name for path in sorted((tmp_path / "two").glob("checkpoint*"))] == ["checkpoint-3", "checkpoint-6"]

    data = load_glue("stsb", glue_folder).evaluation["validation"]
    pairs = zip(data["sentence1"][:], data["sentence2"][:], strict=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two").eval()
    with torch.no_grad():
        said = [model(**tokenizer(*pair, return_tensors="pt")).logits.item() for pair in pairs]
    assert len(said) == 13
    expected = glue_metrics(get_task("stsb"), said, data["label"][:])
    assert results["metrics"]["spearmanr"] == pytest.approx(expected["spearmanr"], abs=1e-9)
    assert results["metrics"]["pearson"] == pytest.approx(expected["pearson"], abs=1e-4)

    # As if both processes had been killed, and the files of one were damaged.
    before = load_file(tmp_path / "two" / "model.safetensors")
    (tmp_path / "two" / "checkpoint-6" / "process_1.json").write_text("")
    for name in ("all_results.json", "model.safetensors"):
        (tmp_path / "two" / name).unlink()
    printed = fork("favor.train.glue", *words, "--resume", processes=2)
    assert "checkpoint-6 cannot be used: process_1.json cannot be read" in printed
    assert printed.count("continuing from checkpoint-3") == 1
    after = load_file(tmp_path / "two" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "two" / "all_results.json").read_text())["metrics"] == results["metrics"]
