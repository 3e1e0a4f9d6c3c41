"""The metrics of GLUE against scikit-learn, scipy and numbers worked out by hand."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from favor.train.text.glue_data import TASKS
from favor.train.text.glue_report import glue_metrics


def score(task, said, true):
    return glue_metrics(TASKS[task], said, true)


def classes(seed: int, number: int = 2) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    return source.integers(0, number, 57), source.integers(0, number, 57)


@pytest.mark.parametrize("task", ["sst2", "mnli", "qnli", "rte", "wnli"])
def test_accuracy(task):
    said, true = classes(0, TASKS[task].num_labels)
    scores = score(task, said, true)
    assert scores == {"accuracy": pytest.approx(sklearn.metrics.accuracy_score(true, said))}
    assert scores["accuracy"] == pytest.approx((said == true).mean())


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_accuracy_and_f1(task):
    said, true = classes(1)
    scores = score(task, said, true)
    assert scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(true, said))
    assert scores["f1"] == pytest.approx(sklearn.metrics.f1_score(true, said))
    by_hand = score(task, [1, 1, 1, 0], [1, 0, 0, 1])
    assert by_hand == {"accuracy": 0.25, "f1": pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))}


def test_matthews_correlation():
    said, true = classes(2)
    scores = score("cola", said, true)
    assert scores == {"matthews_correlation": pytest.approx(sklearn.metrics.matthews_corrcoef(true, said))}
    by_hand = score("cola", [1, 1, 1, 0], [1, 1, 0, 0])
    assert by_hand["matthews_correlation"] == pytest.approx((2 * 1 - 1 * 0) / np.sqrt(3 * 2 * 2 * 1))


def test_correlations():
    source = np.random.default_rng(3)
    true = source.uniform(0, 5, 80)
    said = true**2 + source.normal(0, 2, 80)
    scores = score("stsb", said, true)
    assert scores["pearson"] == pytest.approx(scipy.stats.pearsonr(said, true).statistic)
    assert scores["spearmanr"] == pytest.approx(scipy.stats.spearmanr(said, true).statistic)
    assert score("stsb", [1.0, 10, 100], [1.0, 2, 3])["spearmanr"] == 1.0


@pytest.mark.parametrize("constant", [0, 1])
def test_constant_predictions_score_zero_in_correlations(constant):
    same = [constant] * 4
    assert score("cola", same, [0, 1, 1, 0]) == {"matthews_correlation": 0.0}
    scores = score("stsb", same, [0.0, 1.5, 1.0, 4.0])
    assert scores == {"pearson": 0.0, "spearmanr": 0.0}


def test_nearly_constant_predictions_raise_no_warning():
    nearly = 1.0 + np.array([0.0, 1e-15, 0.0, 2e-15])
    scores = score("stsb", nearly, [0.0, 1.5, 1.0, 4.0])
    assert all(-1.0 <= score <= 1.0 for score in scores.values())


def test_f1_without_positives_is_zero():
    assert score("mrpc", [0, 0], [0, 0]) == {"accuracy": 1.0, "f1": 0.0}


def test_metrics_are_those_of_the_task_table():
    for name, task in TASKS.items():
        references = [0.0, 1.0] if task.is_regression else [0, 1]
        assert set(score(name, references, references)) == set(task.metrics)
