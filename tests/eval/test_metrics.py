"""The metrics of GLUE against scikit-learn, scipy and numbers worked out by hand."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from favor.train.text.glue_data import TASKS
from favor.train.text.glue_report import glue_metrics

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


@pytest.mark.parametrize("name", TASKS)
def test_metrics_of_each_task_are_those_of_other_libraries(name):
    task, source = TASKS[name], np.random.default_rng(0)
    said, true = source.integers(0, max(2, task.num_labels), (2, 57))
    if task.is_regression:
        true = source.uniform(0, 5, 57)
        said = true**2 + source.normal(0, 2, 57)
    found = glue_metrics(task, said, true)
    assert found == {metric: pytest.approx(TRUTH[metric](true, said)) for metric in task.metrics}


@pytest.mark.parametrize(("task", "said", "true", "expected"), BY_HAND)
def test_numbers_by_hand(task, said, true, expected):
    assert glue_metrics(TASKS[task], said, true) == pytest.approx(expected)


def test_nearly_constant_predictions_raise_no_warning():
    nearly = 1.0 + np.array([0.0, 1e-15, 0.0, 2e-15])
    scores = glue_metrics(TASKS["stsb"], nearly, [0.0, 1.5, 1.0, 4.0])
    assert all(-1.0 <= score <= 1.0 for score in scores.values())
