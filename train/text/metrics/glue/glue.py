"""GLUE's metrics by task: accuracy, F1, Matthews correlation, Pearson and Spearman correlation.

metric = evaluate.load("train/metrics/glue", "mrpc")
metric.compute(predictions=[0, 1], references=[0, 1])    # {"accuracy": 1.0, "f1": 1.0}
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_CITATION = """\
@inproceedings{wang2019glue,
  title = {{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author = {Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle = {International Conference on Learning Representations},
  year = {2019}
}
"""

_DESCRIPTION = """\
The metrics of the GLUE benchmark; the configuration is the task's name. A correlation with constant values is
undefined: it is given as 0, the score of a model that has learned nothing, without a warning.
"""

_INPUTS = """
Args:
    predictions: predicted class numbers, for stsb scores.
    references: true class numbers, for stsb scores.

Returns:
    A dictionary of floats. cola: matthews_correlation. stsb: pearson, spearmanr. mrpc, qqp: accuracy and
    f1 of class 1. All others: accuracy.
"""

_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")


def _correlation(function, predictions, references):
    first, second = (np.asarray(values, dtype=np.float64) for values in (predictions, references))
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(function(first, second).statistic)


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class Glue(evaluate.Metric):
    """GLUE's metrics for the task named by the configuration."""

    def _info(self):
        if self.config_name not in _TASKS:
            raise ValueError(f"the configuration must be one of {', '.join(_TASKS)}, got {self.config_name!r}")
        kind = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": kind, "references": kind}),
            format="numpy",
        )

    def _compute(self, predictions, references):
        if self.config_name == "stsb":
            return {
                "pearson": _correlation(pearsonr, predictions, references),
                "spearmanr": _correlation(spearmanr, predictions, references),
            }
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        scores = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in ("mrpc", "qqp"):
            scores["f1"] = float(f1_score(references, predictions, zero_division=0.0))
        return scores
