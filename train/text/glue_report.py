"""Scores and reports of a GLUE run: metrics, baseline, mean over seeds, model card."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers.utils import cached_file

from favor.models.stored_backend import keeps_backend
from favor.train.text.glue_data import HUB_ID, GlueData, Task

# A line of every card that this program writes, and the name of a card where another README.md is not to be lost.
MARK, OTHER_CARD = "Attention backend", "MODEL_CARD.md"


def glue_metrics(task: Task, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Computes GLUE's metrics of a task: accuracy, F1 of class 1, Matthews, Pearson's or Spearman's correlation.

    A correlation with constant values is undefined: it is given as 0, the score of a model that has learned nothing.
    """
    if task.is_regression:
        said, true = (np.asarray(values, dtype=np.float64) for values in (predictions, references))
        defined = not (is_constant(said) or is_constant(true))
        kinds = {"pearson": pearsonr, "spearmanr": spearmanr}
        return {name: float(kind(said, true).statistic) if defined else 0.0 for name, kind in kinds.items()}
    if task.name == "cola":
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
    scores = {"accuracy": float(accuracy_score(references, predictions))}
    if "f1" in task.metrics:
        scores["f1"] = float(f1_score(references, predictions, zero_division=0.0))
    return scores


def baseline(data: GlueData) -> dict[str, float]:
    """Scores a predictor that reads no sentence: it says the training set's most frequent class, or its mean score."""
    labels = data.train["label"][:]
    guess = statistics.fmean(labels) if data.task.is_regression else Counter(labels).most_common(1)[0][0]
    scores: dict[str, float] = {}
    for split, dataset in data.evaluation.items():
        scores.update(named(glue_metrics(data.task, [guess] * len(dataset), dataset["label"][:]), split))
    return scores


def named(scores: dict[str, float], split: str) -> dict[str, float]:
    """Gives scores the names of the results, which have an ending for MNLI's second development set."""
    suffix = "_mismatched" if split.endswith("_mismatched") else ""
    return {f"{name}{suffix}": value for name, value in scores.items()}


def is_constant(predictions: np.ndarray) -> bool:
    """Tells whether a model predicts one class for all samples, or scores that differ only by rounding."""
    return bool(np.ptp(predictions) <= 1e-6)


def summarise(per_seed: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float | None]]:
    """Computes mean and sample standard deviation of each metric over the seeds; None for the deviation of one seed."""
    values = {name: [run["metrics"][name] for run in per_seed] for name in per_seed[0]["metrics"]}
    mean = {name: statistics.fmean(scores) for name, scores in values.items()}
    std = {name: statistics.stdev(scores) if len(scores) > 1 else None for name, scores in values.items()}
    return mean, std


def all_results(data: GlueData, per_seed: list[dict[str, Any]], made: dict[str, Any]) -> dict[str, Any]:
    """Gives the content of `all_results.json`, in one layout for one seed or several; `made` says how it was made."""
    first = per_seed[0]
    mean, std = summarise(per_seed)
    times = [run["seconds_per_step"] for run in per_seed if run["seconds_per_step"] is not None]
    return made | {
        "task_name": data.task.name,
        "model_name_or_path": made["arguments"]["model_name_or_path"],
        **{name: first[name] for name in ("model_type", "attn_implementation", "steps", "mixed_precision")},
        "favor": first["favor"] and {name: value for name, value in first["favor"].items() if name != "seed"},
        "seeds": [run["seed"] for run in per_seed],
        "metric": data.task.metrics[0],
        "metrics": mean,
        "metrics_std": std,
        "baseline": baseline(data),
        "constant_prediction_seeds": [run["seed"] for run in per_seed if run["constant_predictions"]],
        "train_loss": statistics.fmean(run["train_loss"] for run in per_seed),
        "seconds_per_step": statistics.median(times) if times else None,
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in per_seed),
        "train_samples": len(data.train),
        "eval_samples": {split: len(part) for split, part in data.evaluation.items()},
        "sources": data.sources,
        "per_seed": per_seed,
    }


def model_card(task: Task, results: dict[str, Any], name: str) -> str:
    """Writes README.md of an output folder: front matter for the hub, then the run in words and numbers."""
    path, std = results["model_name_or_path"], results["metrics_std"]
    # The path of a local folder tells others nothing, apart from its last two parts.
    base = None if Path(path).exists() else path
    rows = [["metric", "value", "standard deviation over seeds", "majority baseline"], ["---"] * 4]
    for metric, value in results["metrics"].items():
        deviation = "one seed" if std[metric] is None else f"{std[metric]:.4f}"
        rows.append([metric, f"{value:.4f}", deviation, f"{results['baseline'][metric]:.4f}"])
    settings = {
        "Task": f"GLUE {task.folder} (`{task.name}`), {_pairs(results['sources'])}",
        "Samples": _pairs({"train": results["train_samples"], **results["eval_samples"]}),
        "Base model": f"`{base or '/'.join(Path(path).resolve().parts[-2:])}`",
        MARK: f"`{results['attn_implementation']}`",
        "Backend options": _pairs(results["favor"] or {}) or "none",
        "Seeds": ", ".join(map(str, results["seeds"])),
        "Optimizer steps": results["steps"],
        "Versions": _pairs(results["versions"]),
    }
    warnings = (f"- Warning: seed {seed} ends in constant predictions" for seed in results["constant_prediction_seeds"])
    parts = [
        f"---\n{_front_matter(task, results, name, base)}\n---",
        f"# {name}",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "\n".join([*(f"- {label}: {text}" for label, text in settings.items()), *warnings]),
        _usage(task, results, name),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(task: Task, results: dict[str, Any], name: str, base: str | None) -> str:
    """Writes the YAML at the head of a model card, which the hub shows and searches."""
    evaluations = [
        EvalResult(
            task_type="text-classification",
            task_name="Text Classification",
            dataset_type=HUB_ID,
            dataset_name=f"GLUE {task.folder}",
            dataset_config=task.name,
            dataset_split=task.eval_splits[-1 if metric.endswith("_mismatched") else 0],
            metric_type=metric.removesuffix("_mismatched"),
            metric_name=metric,
            metric_value=round(value, 6),
        )
        for metric, value in results["metrics"].items()
    ]
    try:
        card = metadata_load(str(cached_file(results["model_name_or_path"], "README.md")))
    except (OSError, ValueError, yaml.YAMLError):
        card = None
    data = ModelCardData(
        language="en",
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["favor", "linear-attention", "glue"],
        base_model=base,
        license=str((card or {}).get("license", "unknown")),
        datasets=[HUB_ID],
        metrics=list(task.metrics),
        model_name=name,
        eval_results=evaluations,
    )
    return data.to_yaml()


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _usage(task: Task, results: dict[str, Any], name: str) -> str:
    if len(results["seeds"]) > 1:
        return "In this folder, one folder per seed holds the model of that seed."
    # Only configurations of the zoo save their backend; for others the user must name it again.
    by_itself = keeps_backend(results["model_type"]) or not results["favor"]
    backend = "" if by_itself else f', attn_implementation="{results["attn_implementation"]}"'
    texts = ", ".join(f'"A {column}."' for column in task.sentences)
    logits = "model(**inputs).logits[0]"
    said = f"{logits}.item()" if task.is_regression else f"model.config.id2label[{logits}.argmax().item()]"
    return f"""```python
import favor.models
from transformers import AutoModelForSequenceClassification, AutoTokenizer

path = "{name}"  # this folder, or its name on the hub
model = AutoModelForSequenceClassification.from_pretrained(path{backend}).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
inputs = tokenizer({texts}, return_tensors="pt")
print({said})
```"""
