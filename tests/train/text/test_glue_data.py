"""GLUE's TSV files: each task's layout and quirks, and every malformed row named by file and line."""

import gzip
from contextlib import nullcontext

import pytest
from datasets import Dataset

from favor.train.common.arguments import DataArguments, TrainArguments
from favor.train.text.glue_data import TASKS, GlueData, get_task, load_glue
from favor.train.text.glue_models import make_loaders
from favor_command.saved import load_processor

# One row a task, as the official files have it, and what the hub's dataset holds for it.
LAYOUTS = {
    "cola": (None, "gj04\t0\t*\tThey drank the pub.", {"sentence": "They drank the pub.", "label": 0}),
    "sst2": ("sentence\tlabel", "no wit , only gags \t0", {"sentence": "no wit , only gags ", "label": 0}),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t70\t71\tHe said " no .\tHe said no .',
        {"sentence1": 'He said " no .', "sentence2": "He said no .", "label": 1},
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane.\tAn air plane.\t4.750",
        {"sentence1": "A plane.", "sentence2": "An air plane.", "label": 4.75},
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "133273\t213221\t213222\tWhy?\tWhy not?\t1",
        {"question1": "Why?", "question2": "Why not?", "label": 1},
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\t31\t31n\tgovernment\t(\t(\t(ROOT\t(ROOT\tCream.\tMilk.\tentailment\tneutral",
        {"premise": "Cream.", "hypothesis": "Milk.", "label": 1},
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        "0\tWhen?\tNever.\tnot_entailment",
        {"question": "When?", "sentence": "Never.", "label": 1},
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tIt rains.\tIt is wet.\tentailment",
        {"sentence1": "It rains.", "sentence2": "It is wet.", "label": 0},
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tI stuck a pin.\tThe pin stuck.\t1",
        {"sentence1": "I stuck a pin.", "sentence2": "The pin stuck.", "label": 1},
    ),
}


def write(folder, files: dict[str, str]):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        content = text.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def rte(*rows: str) -> str:
    return "\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n"


GOOD = rte("0\ta\tb\tentailment", "1\tc\td\tnot_entailment")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_official_layout(name, end, tmp_path):
    header, row, expected = LAYOUTS[name]
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


def test_quotes_odd_line_ends_and_empty_sentences_stay(tmp_path):
    odd = '"start\x85 a\u2028b\x0c"'
    write(tmp_path, {"train.tsv": rte(f"0\t{odd}\t\tentailment"), "dev.tsv": GOOD})
    row = load_glue("rte", tmp_path).train[0]
    assert (row["sentence1"], row["sentence2"]) == (odd, "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1\tc\tnot_entailment", "expected 4 fields, got 3"),
        ("1\tc\td\te\tnot_entailment", "expected 4 fields, got 5"),
        ("1\tc\td\tneutral", "expected a label of entailment, not_entailment, got 'neutral'"),
        ("1\tc\td\t1", "got '1'"),
        ("", "expected 4 fields, got 1"),
        ("1\tc\0\td\tnot_entailment", "expected UTF-8 text without NUL"),
    ],
)
def test_malformed_row_names_file_and_line(row, reason, tmp_path):
    good = "0\ta\tb\tentailment"
    write(tmp_path, {"train.tsv": GOOD, "dev.tsv.gz": rte(good, good, row, good)})
    with pytest.raises(ValueError, match=r"dev\.tsv\.gz:4: ") as error:
        load_glue("rte", tmp_path)
    assert reason in str(error.value)


@pytest.mark.parametrize("score", ["5.001", "-0.1", "nan", "inf", "high", ""])
def test_score_out_of_range(score, tmp_path):
    header, row, _ = LAYOUTS["stsb"]
    bad = row.replace("4.750", score)
    write(tmp_path, {"train.tsv": f"{header}\n{row}\n{bad}\n", "dev.tsv": f"{header}\n{row}\n"})
    with pytest.raises(ValueError, match=r"train\.tsv:3: expected a score between 0 and 5"):
        load_glue("stsb", tmp_path)


def test_blank_lines_at_the_end_are_no_rows(tmp_path):
    write(tmp_path, {"train.tsv": GOOD + "\n\r\n", "dev.tsv": GOOD})
    assert load_glue("rte", tmp_path).train.num_rows == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.tsv", b"", "expected columns sentence1, sentence2, label in the header, got nothing"),
        ("train.tsv", b"index\tsentence1\tlabel\n", "got index, sentence1, label"),
        ("train.tsv", rte().encode(), "expected rows"),
        ("train.tsv", b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tb\tentailment\n", "UTF-8"),
        ("train.tsv.gz", gzip.compress(GOOD.encode(), mtime=0)[:30], "train.tsv.gz cannot be read"),
        ("train.tsv.gz", GOOD.encode(), "train.tsv.gz cannot be read"),
    ],
)
def test_unusable_file(name, content, message, tmp_path):
    write(tmp_path, {"dev.tsv": GOOD})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_glue("rte", tmp_path)
    assert name in str(error.value)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"unknown GLUE task 'mprc'.*cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"
    ):
        load_glue("mprc", tmp_path)
    with pytest.raises(ValueError, match="data_dir must be an existing folder"):
        load_glue("rte", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.tsv or \.tsv\.gz file for rte in .*RTE"):
        load_glue("rte", tmp_path)
    write(tmp_path / "RTE", {"train.tsv": GOOD, "notes.txt": ""})
    with pytest.raises(ValueError, match=r"dev\.tsv, dev\.tsv\.gz, .*which holds notes\.txt, train\.tsv"):
        load_glue("rte", tmp_path)


def test_hub_out_of_reach_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ValueError, match=r"nyu-mll/glue from the hub .* set data_dir"):
        load_glue("rte")


def test_hub_splits(monkeypatch):
    asked = []
    names = ("train", "validation_matched", "validation_mismatched", "test_matched")
    hub = {name: Dataset.from_dict({"premise": [name], "hypothesis": ["h"], "label": [0]}) for name in names}
    monkeypatch.setattr("favor.train.text.glue_data.load_dataset", lambda *names: asked.append(names) or hub)
    data = load_glue("mnli")
    assert asked == [("nyu-mll/glue", "mnli")]
    assert data.train["premise"][:] == ["train"]
    assert list(data.evaluation) == ["validation_matched", "validation_mismatched"]
    assert data.sources["train"] == "nyu-mll/glue mnli"


def test_keep_first(glue_folder):
    data = load_glue("sst2", glue_folder)
    before = data.train["sentence"][:3]
    data.keep_first(3, 1000)
    assert data.train["sentence"][:] == before
    assert data.evaluation["validation"].num_rows == 12


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
    assert data.evaluation["validation"]["sentence1"][1].split() in (
        ["text0"] * n + ["text1"] + ["text0"] * (3 - n) for n in range(4)
    )
    for name in ("sentence2", "label"):
        assert data.train[name][:] == plain.train[name][:]


def test_distractors_that_cannot_be(tmp_path, glue_folder):
    data = load_glue("sst2", glue_folder)
    data.add_distractors(0)
    with pytest.raises(ValueError, match="change the labels of sst2; tasks that have them: mnli, qnli, rte"):
        data.add_distractors(1)
    alone = rte("0\ta\tb\tentailment")
    data = load_glue("rte", write(tmp_path, {"train.tsv": alone, "dev.tsv": alone}))
    with pytest.raises(ValueError, match="the split has 1"):
        data.add_distractors(1)


@pytest.mark.parametrize(("train", "refused"), [(["good film"], False), (["good film"] * 1000 + ["zz"] * 2000, True)])
def test_the_samples_to_train_must_be_known(train, refused, bert_folder):
    """All of them together: the few of a development set may well be of rare words."""
    splits = [Dataset.from_dict({"sentence": texts, "label": [0] * len(texts)}) for texts in (train, ["zz"])]
    data = GlueData(get_task("sst2"), splits[0], {"validation": splits[1]}, {})
    arguments = DataArguments(task_name="sst2"), TrainArguments(output_dir=""), 0, None, [0, 1]
    said = pytest.raises(ValueError, match=r"50% of the tokens of the samples of SST-2") if refused else nullcontext()
    with said:
        make_loaders(data, load_processor(str(bert_folder)), *arguments)
