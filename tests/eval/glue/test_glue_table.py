"""The table of the evaluation, runs that are really trained and reloaded, and metrics beside those of libraries."""

import json
import re
import statistics

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from launching import Forked

from favor.eval.common import launch
from favor.eval.common.launch import Backend
from favor.eval.glue import __main__ as glue
from favor.eval.glue import table
from favor.train import distill
from favor.train.text.glue_data import TASKS as GLUE_TASKS
from favor.train.text.glue_report import glue_metrics

TASKS = [column.task for column in table.COLUMNS]
# Means of the paper's rows over the eight tasks, computed apart from the rows themselves.
PAPER_MEANS = {"ELU": 82.01, "RELU": 82.14, "FAVOR+": 78.90, "FAVOR++": 81.97, "FAVOR#": 82.30}


def all_results(task: str, seed: int, value: float, baseline: float = 0.5, **changes) -> dict:
    """The parts of an `all_results.json` that the table reads; metrics it must not take have other values."""
    metrics = dict.fromkeys(("accuracy", "f1", "pearson", "matthews_correlation", "spearmanr"), 0.01)
    metric = table.column(task).metric
    results = {"task_name": task, "model_name_or_path": "a/model", "seeds": [seed], "train_samples": 1234, "steps": 7}
    results |= {"metrics": {**metrics, metric: value}, "baseline": {**metrics, metric: baseline}, "favor": None}
    results |= {"seconds_per_step": 0.25, "peak_memory_bytes": 512 * 2**20, "constant_prediction_seeds": []}
    results |= {"sources": {"train": "train.tsv", "validation": "dev.tsv"}, "versions": {"torch": "2"}}
    return results | changes


def run(task: str, backend: str, seed: int, value: float, **changes) -> table.Run:
    return table.Run.of(all_results(task, seed, value, **changes), backend, "a machine")


def rows_of(lines: list[str]) -> dict[str, list[str]]:
    """A Markdown table as its first column and the cells right of it."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_values_stand_in_their_columns():
    runs = [run(task, "favor+", 0, 0.1 + 0.01 * i, baseline=0.3 + 0.01 * i) for i, task in enumerate(TASKS)]
    rows = rows_of(table.score_lines(runs))
    assert rows["System"][::4] == ["MNLI(m) acc", "CoLA MCC", "mean"]
    assert rows["`favor+`"] == [*(f"**{10 + i}.00**" for i in range(8)), "13.50"]
    assert rows["majority baseline"] == [*(f"{30 + i}.00" for i in range(8)), "33.50"]
    assert rows["training rows"] == [*["1234"] * 8, "-"]


def test_mean_and_deviation_over_seeds_and_costs():
    values, seconds, peaks = [0.61, 0.64, 0.70], [0.1, 0.5, 0.2], [300, 200, 100]
    runs = [
        run("rte", "landmark", seed, value, seconds_per_step=seconds[seed], peak_memory_bytes=peaks[seed] * 2**20)
        for seed, value in enumerate(values)
    ]
    cell = rows_of(table.score_lines(runs))["`landmark`"][7]
    assert cell == f"**{100 * np.mean(values):.2f}** ± {100 * np.std(values, ddof=1):.2f}"
    assert table.summarise(runs)["landmark"]["rte"]["seeds"] == [0, 1, 2]
    assert rows_of(table.cost_lines(runs))["`landmark`"] == ["0.200 s, 300 MB"]
    resumed = run("rte", "landmark", 3, 0.5, seconds_per_step=None)
    assert rows_of(table.cost_lines([resumed]))["`landmark`"] == ["-"]
    assert rows_of(table.cost_lines([*runs, resumed]))["`landmark`"] == ["0.200 s, 512 MB"]


def test_bold_is_the_best_linear_backend_of_a_column():
    scores = {("cola", "sdpa"): 0.9, ("cola", "favor+"): 0.4, ("cola", "favor#"): 0.6}
    scores |= {("rte", "favor+"): 0.8, ("rte", "favor#"): 0.7}
    rows = rows_of(table.score_lines([run(*key, 0, value) for key, value in scores.items()]))
    assert rows["`sdpa`"] == ["-"] * 4 + ["90.00"] + ["-"] * 4  # no mean without RTE
    assert rows["`favor+`"] == ["-"] * 4 + ["40.00"] + ["-"] * 2 + ["**80.00**", "60.00"]
    assert rows["`favor#`"] == ["-"] * 4 + ["**60.00**"] + ["-"] * 2 + ["70.00", "65.00"]
    assert rows["majority baseline"] == ["-"] * 4 + ["50.00"] + ["-"] * 2 + ["50.00"] * 2
    assert rows["*paper: FAVOR+*"][-1] == "60.53"  # of CoLA and RTE


def test_paper_rows():
    for name, mean in PAPER_MEANS.items():
        assert statistics.fmean(table.PAPER[name]) == pytest.approx(mean, abs=0.0051)
    rows = rows_of(table.score_lines([run("rte", "favor+", 0, 0.5)]))
    bold = [sum(cell.startswith("**") for cell in rows[f"*paper: {name}*"]) for name in PAPER_MEANS]
    assert bold == [0, 2, 0, 1, 5]


def test_the_other_half_of_mnli_has_a_line():
    runs = [
        run("mnli", backend, seed, 0.5, metrics={"accuracy": 0.5, "accuracy_mismatched": value})
        for backend, seed, value in (("sdpa", 0, 0.7), ("sdpa", 1, 0.72), ("favor+", 0, 0.6))
    ]
    (line,) = table.mismatched_lines([*runs, run("rte", "sdpa", 0, 0.5)])
    assert line == "- MNLI, mismatched half (accuracy): `sdpa` 71.00 ± 1.41, `favor+` 60.00"
    assert table.mismatched_lines([run("rte", "sdpa", 0, 0.5)]) == []


def test_contradictions_are_errors():
    first, others = run("rte", "sdpa", 0, 0.5), (run("rte", "sdpa", 0, 0.6), run("rte", "sdpa", 1, 0.6, baseline=0.51))
    with pytest.raises(ValueError, match=r"one run per seed .* got seeds \[0, 0\]"):
        table.summarise([first, others[0]])
    with pytest.raises(ValueError, match="disagree on the majority baseline"):
        table.baselines([first, others[1]])
    with pytest.raises(ValueError, match="results of one seed"):
        run("rte", "sdpa", 0, 0.5, seeds=[0, 1])


def test_the_number_of_features_is_given_once():
    for words in (["--num_features", "32"], ["--task_options", "rte:num_features=32"]):
        glue.parse_arguments(["--backends", "favor+", *words])
        with pytest.raises(ValueError, match="--num_features is set by"):
            glue.parse_arguments(["--backends", "favor+:64", *words])


def test_backends_as_arguments_and_folders():
    words = Backend.parse("favor#:saderf:64").arguments()
    assert words == ["--attn_implementation", "favor#", "--features", "saderf", "--num_features", "64"]
    names = ("sdpa", "favor+", "favor++", "favor#", "favor#:sderf", "favor_relu", "favor+:64", "favor#:sderf:8")
    assert all(Backend.parse(name).label == name for name in names)
    slugs = {Backend.parse(name).slug for name in names}
    assert len(slugs) == len(names)
    assert all(slug.replace("_", "").replace("-", "").isalnum() for slug in slugs)


def test_an_adapted_model_is_a_row_and_the_report_says_how_it_was_adapted(tmp_path):
    arguments = {"attn_implementation": "favor#", "features": "sderf", "num_features": 8, "window": 32}
    results = {"arguments": {**arguments, "exact_heads": 3}, "seconds": 120.0, "model_loss": []}
    results |= {"command": "python -m favor.train.distill --num_features 8", "attention_loss": [*map(float, range(20))]}
    results["errors"] = {"closed form": 0.3, "attention": 0.2, "exact heads": 0.1}
    results["layers"] = {"a": {"key_heads": 4, "exact_heads": [1, 2, 3]}, "b": {"key_heads": 4}}
    (tmp_path / "all_results.json").write_text(json.dumps(results))
    adapted = Backend.adapted(str(tmp_path))
    name = f"favor#:sderf:8, window 32, 3 exact heads, adapted: {tmp_path.name}"
    slug = f"favor_sharp-sderf-8-window_32-3_exact_heads-adapted_{tmp_path.name}"
    assert (adapted.label, adapted.slug, adapted.arguments()) == (name, slug, [])
    lines = table.adaptation_lines(table.read_adapted([str(tmp_path)]))
    assert f"- `{name}`: `{results['command']}`" in lines
    assert f"| `{name}` | 2 | 3 | 0.3000 | 0.2000 | 0.1000 |  |" in lines
    tenths = " | ".join(f"{2 * part + 0.5:.4f}" for part in range(10))
    assert lines[-1] == f"| `{name}`, attention | {tenths} |"
    (tmp_path / "all_results.json").write_text(json.dumps({"arguments": {"seed": 0}}))
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match=r"expected a finished folder of favor\.train\.distill"):
            Backend.adapted(str(folder))


@pytest.mark.slow
def test_an_adapted_model_is_fine_tuned(bert_folder, glue_folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "subprocess", Forked)
    adapted, sizes = tmp_path / "adapted", ["--num_features", "8", "--max_length", "32", "--attention_steps", "2"]
    folders = ["--model_name_or_path", str(bert_folder), "--train_file", str(text), "--output_dir", str(adapted)]
    distill.main([*folders, *sizes])
    common = ["--tasks", "sst2", "--name", "table"]
    train = [*common, "--data_dir", str(glue_folder), "--output_dir", str(tmp_path / "runs")]
    monkeypatch.setattr(glue, "minilm_path", pytest.fail)  # the package of MiniLM is not needed
    assert glue.main([*train, "--adapted", str(adapted), "--exact_below", "0", "--max_train_steps", "2"]) == 0
    row = json.loads((tmp_path / "runs" / "table.json").read_text())["rows"]["favor#:8, adapted: adapted"]["sst2"]
    options = row["details"][0]["options"]
    assert (options["num_features"], options["statistics"], options["exact_below"]) == (8, "corrected", 0)
    command = f"`python -m favor.train.distill --model_name_or_path {bert_folder.name}"
    assert f"- `favor#:8, adapted: adapted`: {command}" in (tmp_path / "runs" / "table.md").read_text()


@pytest.mark.slow
def test_train_fail_and_resume(bert_folder, glue_folder, tmp_path, capsys, monkeypatch):
    """CoLA, which has no data here, is reported and leaves a dash."""
    monkeypatch.setattr(launch, "subprocess", Forked)
    words = f"--model_name_or_path {bert_folder} --data_dir {glue_folder} --output_dir {tmp_path}/runs"
    words += f" --results_dir {tmp_path} --tasks sst2 cola --backends sdpa favor#:saderf:8 --seeds 3 --name table"
    words += " --exact_below 0 --learning_rate 1e-2 --max_train_steps 4 --task_options sst2:max_train_steps=3"
    train = words.split()
    assert glue.main(train) == 1
    printed = capsys.readouterr()
    assert "was finished before" not in printed.out
    assert re.search("(?s)cola sdpa seed 3: FAILED.* found no .tsv or .tsv.gz file for cola", printed.out)
    assert "cola sdpa seed 3" in printed.err
    content = json.loads((tmp_path / "table.json").read_text())
    for backend, slug in (("sdpa", "sdpa"), ("favor#:saderf:8", "favor_sharp-saderf-8")):
        saved = json.loads((tmp_path / "runs" / "sst2" / slug / "seed_3" / "all_results.json").read_text())
        assert (saved["steps"], saved["attn_implementation"]) == (3, backend.split(":")[0])
        assert content["rows"][backend]["sst2"]["values"] == [saved["metrics"]["accuracy"]]
    assert content["rows"]["favor#:saderf:8"]["sst2"]["details"][0]["options"]["num_features"] == 8
    assert content["majority_baseline"]["sst2"] == pytest.approx(0.5)
    report = (tmp_path / "table.md").read_text()
    assert "Seeds: 3" in report
    scores = next(line for line in report.splitlines() if line.startswith("| `sdpa`"))
    assert [cell == "-" for cell in rows_of([scores])["`sdpa`"]] == [True] * 3 + [False] + [True] * 4
    glue.main(train)
    assert capsys.readouterr().out.count("was finished before") == 2
    with pytest.raises(ValueError, match="holds a finished run with other arguments"):
        glue.main([word.replace("1e-2", "1e-3") for word in train])


TRUTH = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": sklearn.metrics.f1_score,
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "pearson": lambda true, said: scipy.stats.pearsonr(said, true).statistic,
    "spearmanr": lambda true, said: scipy.stats.spearmanr(said, true).statistic,
}
F1 = 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)
BY_HAND = [
    ("mrpc", [1, 1, 1, 0], [1, 0, 0, 1], {"accuracy": 0.25, "f1": F1}),
    ("mrpc", [0, 0], [0, 0], {"accuracy": 1.0, "f1": 0.0}),  # no positives
    ("cola", [1, 1, 1, 0], [1, 1, 0, 0], {"matthews_correlation": 2 / np.sqrt(3 * 2 * 2 * 1)}),
    # Constant predictions have no correlation.
    *(("cola", [said] * 4, [0, 1, 1, 0], {"matthews_correlation": 0.0}) for said in (0, 1)),
    *(("stsb", [said] * 4, [0.0, 1.5, 1.0, 4.0], {"pearson": 0.0, "spearmanr": 0.0}) for said in (0, 1)),
]


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_metrics_of_each_task_are_those_of_other_libraries(name):
    task, source = GLUE_TASKS[name], np.random.default_rng(0)
    said, true = source.integers(0, max(2, task.num_labels), (2, 57))
    if task.is_regression:
        true = source.uniform(0, 5, 57)
        said = true**2 + source.normal(0, 2, 57)
    found = glue_metrics(task, said, true)
    assert found == {metric: pytest.approx(TRUTH[metric](true, said)) for metric in task.metrics}


@pytest.mark.parametrize(("task", "said", "true", "expected"), BY_HAND)
def test_numbers_by_hand(task, said, true, expected):
    assert glue_metrics(GLUE_TASKS[task], said, true) == pytest.approx(expected)


def test_nearly_constant_predictions_raise_no_warning():
    nearly = 1.0 + np.array([0.0, 1e-15, 0.0, 2e-15])
    scores = glue_metrics(GLUE_TASKS["stsb"], nearly, [0.0, 1.5, 1.0, 4.0])
    assert all(-1.0 <= score <= 1.0 for score in scores.values())
