"""Kernel classification with random features: Figure 3 of the FAVOR# paper.

    python -m favor.eval.papers.kernel_classification --data_dir DIR --shuffles 3
    python -m favor.eval.papers.kernel_classification --datasets iris wine breast_cancer digits

Nadaraya-Watson: the class of u* is the largest entry of sum_i K(s u*, s u_i) onehot(r_i) over the training set, with
the Gaussian kernel K = exp(-|x - y|^2/2) estimated by random features (alpha = -1/2). Each data set is shuffled and
split 90/5/5, equally for all methods. s is the best of ten values from 0.01 to 100 on the validation part, by the mean
accuracy over 50 draws of the features; the test accuracy is the mean over 50 fresh draws. Parameters of positive
features are fitted, without labels, to the two sets of the kernel: queries (validation or test inputs) as x and
training inputs as y. Directions are orthogonal, and in opposite pairs for families with opposite pairs as their default
(cderf). A number M below the largest uses the first M features of each draw.

DIR holds the UCI files (see `favor.eval.papers.datasets`) or your own CSV files, named by --datasets.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.kernel_approximation import RBFSampler
from torch import Tensor

from favor import features
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers.common import panels_by_name, save, styles
from favor.eval.papers.datasets import BUNDLED, UCI, Dataset, load
from favor.train.common.program import Parser, program

POSITIVE = ("pos", "gerf", "saderf", "aderf", "sderf", "cderf")
RBF_SAMPLER = "RBFSampler"
METHODS = (RBF_SAMPLER, "trig", *POSITIVE)
COUNTS = (16, 32, 64, 128)  # numbers of features M
SCALES = tuple(np.logspace(-2, 2, 10).tolist())
DRAWS = 50  # of the features, in validation and in test
FIRST_TEST_SEED = 1 << 20
ALPHA = -0.5
CHUNK = 1 << 20  # feature values computed at once, so that they stay in cache
MEAN = "mean over data sets"

Results = Mapping[str, Mapping[str, Any]]
Scores = Callable[[int, Sequence[Tensor]], list[Tensor]]


def split(dataset: Dataset) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Splits features and labels into "train" (90 %), "validation" (5 %) and "test" (5 %), in the order of the rows.

    Features are centred and divided by their standard deviation, both of the training part. A column that is constant
    in the training part is only centred.
    """
    number = len(dataset.labels)
    held = round(0.05 * number)
    if held < 1:
        raise ValueError(f"{dataset.name}: 5 % of {number} rows is no row; at least 10 are needed.")
    ends, parts = (number - 2 * held, number - held), ("train", "validation", "test")
    train = dataset.x[: ends[0]]
    spread = train.std(0)
    scaled = (dataset.x - train.mean(0)) / np.where(spread > 0, spread, 1.0)
    inputs, labels = (dict(zip(parts, np.split(rows, ends), strict=True)) for rows in (scaled, dataset.labels))
    return inputs, labels


def columns_of(method: str, count: int, largest: int) -> Tensor:
    """Selects `count` features from a draw of `largest`; opposite directions and sin/cos pairs stay together."""
    paired = method == "trig" or (method in POSITIVE and features.get(method).antithetic)
    if not paired:
        return torch.arange(count)
    return torch.cat((torch.arange(count // 2), largest // 2 + torch.arange(count // 2)))


def accuracies(
    method: str, x: Tensor, y: Tensor, targets: Tensor, onehot: Tensor, counts: Sequence[int], seeds: Sequence[int]
) -> np.ndarray:
    """Computes the accuracy of the classifier for every number of features and seed, `[len(counts), len(seeds)]`.

    Queries x `[Q, d]` and training inputs y `[N, d]` are multiplied by s, float64. Labels of queries are the `targets`
    `[Q]`, those of training inputs are `onehot`, `[N, C]` float32. Counts are even for "trig" and families with pairs.
    """
    picks = [columns_of(method, count, max(counts)) for count in counts]
    scores = scorer(method, x, y, onehot, max(counts))
    # One seed at a time: then the large matrix, training set by features, stays in cache.
    right = [[(each.argmax(-1) == targets).double().mean().item() for each in scores(seed, picks)] for seed in seeds]
    return np.array(right).T


def scorer(method: str, x: Tensor, y: Tensor, onehot: Tensor, largest: int) -> Scores:
    """Makes the function that scores a draw of `largest` features by seed and selections of them, `[Q, C]` each.

    Scores of positive features are up to a positive factor of each query: logarithms of features leave out the part
    that depends on the query alone. For each feature, the largest logarithm over the training set is subtracted there
    and added to that of the queries. Then, for each query, the largest logarithm over features is subtracted: nothing
    overflows, and the greatest feature of a query is 1.
    """
    if method not in POSITIVE:
        return lambda seed, picks: _signed_scores(method, x.float(), y.float(), onehot, largest, seed, picks)
    rf = features.get(method, alpha=ALPHA)
    assert isinstance(rf, features.PositiveFeatures)
    params = rf.fit(x, y)
    # Two more columns add a bias per row and a bias per feature within the matrix product.
    keys = torch.cat((y, rf.key_bias(y, params).unsqueeze(-1), y.new_ones(len(y), 1)), dim=-1).float()

    def scores(seed: int, picks: Sequence[Tensor]) -> list[Tensor]:
        omega = rf.draw(largest, x.shape[-1], generator=torch.Generator().manual_seed(seed))
        to_query, to_key, offset = rf.directions(omega, params)
        to_key = torch.cat((to_key, offset.new_ones(largest, 1), offset.unsqueeze(-1)), dim=-1).float()
        votes, top = [], []
        for part in to_key.split(max(1, CHUNK // len(y))):
            log_phi = keys @ part.T
            top.append(log_phi.amax(0))
            votes.append(log_phi.sub_(top[-1]).exp_().T @ onehot)
        vote = torch.cat(votes)
        log_query = x.float() @ to_query.float().T + torch.cat(top)
        picked = [(log_query[:, pick], vote[pick]) for pick in picks]
        return [(logs - logs.amax(-1, keepdim=True)).exp() @ own for logs, own in picked]

    return scores


def _signed_scores(
    method: str, x: Tensor, y: Tensor, onehot: Tensor, largest: int, seed: int, picks: Sequence[Tensor]
) -> list[Tensor]:
    """Scores a draw of trigonometric features or of scikit-learn's RBFSampler."""
    if method == RBF_SAMPLER:
        sampler = RBFSampler(gamma=0.5, n_components=largest, random_state=seed).fit(x[:1].numpy())
        phi_x, phi_y = (torch.from_numpy(sampler.transform(rows.numpy())) for rows in (x, y))
    else:
        rf = features.TrigRF(alpha=ALPHA)
        omega = rf.draw(largest, x.shape[-1], generator=torch.Generator().manual_seed(seed)).float()
        phi_x, phi_y = rf.phi(x, omega), rf.phi(y, omega)
    vote = phi_y.T @ onehot
    return [phi_x[:, pick] @ vote[pick] for pick in picks]


def exact_accuracy(x: Tensor, y: Tensor, targets: Tensor, onehot: Tensor) -> float:
    """Computes the accuracy with the kernel itself; arguments are those of `accuracies`."""
    guesses = []
    for rows in x.split(256):
        # |x|^2 does not change the order of a query's scores.
        logits = rows @ y.T - y.square().sum(-1) / 2
        guesses.append((logits.softmax(-1) @ onehot.double()).argmax(-1))
    return (torch.cat(guesses) == targets).double().mean().item()


def evaluate(dataset: Dataset) -> dict[str, Any]:
    """Evaluates all methods on one split of one data set, whose rows are already in random order.

    Returns:
        "exact": scale and test accuracy of the kernel; "majority": test accuracy of the commonest training class;
        "methods": {method: {M: {"scale", "validation", "test" (mean), "std" (over draws)}}}.
    """
    inputs = split(dataset)
    parts, targets = ({name: torch.from_numpy(rows) for name, rows in own.items()} for own in inputs)
    onehot = torch.nn.functional.one_hot(targets["train"], dataset.classes).float()

    def exact(part: str, scale: float) -> float:
        return exact_accuracy(scale * parts[part], scale * parts["train"], targets[part], onehot)

    def run(method: str, part: str, scale: float, first_seed: int) -> np.ndarray:
        x, y = scale * parts[part], scale * parts["train"]
        return accuracies(method, x, y, targets[part], onehot, COUNTS, range(first_seed, first_seed + DRAWS))

    best = SCALES[int(np.argmax([exact("validation", s) for s in SCALES]))]
    result: dict[str, Any] = {
        "sizes": {name: len(rows) for name, rows in parts.items()},
        "exact": {"scale": best, "test": exact("test", best)},
        "majority": float((targets["test"] == onehot.sum(0).argmax()).double().mean()),
        "methods": {},
    }
    for method in METHODS:
        validation = np.stack([run(method, "validation", s, 0).mean(-1) for s in SCALES])  # [scales, counts]
        chosen = validation.argmax(0)
        test = {number: run(method, "test", SCALES[number], FIRST_TEST_SEED) for number in set(chosen.tolist())}
        cells = result["methods"].setdefault(method, {})
        for i, (count, number) in enumerate(zip(COUNTS, chosen.tolist(), strict=True)):
            own, cell = test[number][i], {"scale": SCALES[number], "validation": float(validation[number, i])}
            cells[str(count)] = cell | {"test": float(own.mean()), "std": float(own.std(ddof=1))}
    return result


def curve(results: Sequence[Mapping[str, Any]], method: str) -> list[float]:
    """Computes test accuracies in %, the mean over splits and data sets, for every number of features."""
    methods = [[split["methods"][method] for split in result["splits"]] for result in results]
    return [100 * float(np.mean([[own[str(m)]["test"] for own in splits] for splits in methods])) for m in COUNTS]


def checks(results: Results) -> list[report.Check]:
    """Checks that, on average over the data sets, cderf is at least as good as sderf, and sderf as gerf, at every M."""
    found = []
    for better, worse in itertools.pairwise(("cderf", "sderf", "gerf")):
        pairs = list(zip(*(curve(list(results.values()), method) for method in (better, worse)), strict=True))
        numbers = ", ".join(f"M = {c}: {one:.2f} and {two:.2f}" for c, (one, two) in zip(COUNTS, pairs, strict=True))
        statement = f"mean accuracy of {better} is at least that of {worse} at every M"
        found.append(report.Check(statement, numbers, all(one >= two for one, two in pairs)))
    return found


def report_lines(results: Results, shuffles: int) -> list[str]:
    """Writes the Markdown report: the mean over data sets, then a section for each; the best of a column is bold."""
    every = list(results.values())
    lines = [
        "# Kernel classification with random features (Figure 3 of the FAVOR# paper)",
        "",
        *_settings(shuffles),
        "",
        f"## {MEAN[0].upper()}{MEAN[1:]}",
        "",
        *_table(every),
        "",
        _baselines(every),
    ]
    for name, result in results.items():
        sizes = result["splits"][0]["sizes"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{result['rows']} rows, {result['dim']} columns after encoding, {result['classes']} classes; "
            f"{sizes['train']} training, {sizes['validation']} validation, {sizes['test']} test rows. "
            f"{_baselines([result])} In brackets: standard deviation over draws, chosen s"
            + (" (both the mean, that of s geometric, over splits)." if shuffles > 1 else "."),
            "",
            *_table([result]),
        ]
    return lines


def _settings(shuffles: int) -> list[str]:
    """Explains in words how the measurements were made."""
    splits = f"{shuffles} random splits, averaged" if shuffles > 1 else "one random split"
    return [
        f"Test accuracy in %, Nadaraya-Watson with the Gaussian kernel exp(-s^2 |u - v|^2/2); 90/5/5, {splits}, seed "
        f"0; {DRAWS} draws of the features in validation and as many fresh ones in test; s by validation from "
        f"{len(SCALES)} values, {min(SCALES):g} to {max(SCALES):g}. Columns that read as numbers are numbers, others "
        "one-hot (chess board files a-h are 1-8); every column is centred and scaled to unit variance on the training "
        "part.",
        "",
        "Parameters are fitted to (s test inputs, s training inputs), in validation to (s validation inputs, s "
        "training inputs), without labels. Directions are orthogonal, those of cderf in opposite pairs besides; trig "
        "is the sin/cos form; RBFSampler is scikit-learn's (independent directions, random phase); cderf is not in the "
        "paper. Features in float32, parameters in float64. M below the largest takes the first M features of the "
        "same draws.",
        "",
        "Queries and training inputs come from one standardised distribution: their moments are nearly equal and their "
        "means near zero. So saderf and aderf are nearly gerf here, and cderf is nearly sderf with opposite pairs.",
    ]


def _percent(results: Sequence[Mapping[str, Any]], key: str) -> float:
    """Computes the mean of "exact" or "majority" in %."""
    values = [[s[key] if key == "majority" else s[key]["test"] for s in r["splits"]] for r in results]
    return 100 * float(np.mean(values))


def _baselines(results: Sequence[Mapping[str, Any]]) -> str:
    return f"Exact kernel {_percent(results, 'exact'):.1f}, most common class {_percent(results, 'majority'):.1f}."


def _table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes a row per method; for a single data set with deviations and scales."""
    values = {method: curve(results, method) for method in METHODS}
    best = [max(column) for column in zip(*values.values(), strict=True)]
    rows = []
    for method, row in values.items():
        rows.append([method])
        for count, value, most in zip(COUNTS, row, best, strict=True):
            text = f"**{value:.1f}**" if value == most else f"{value:.1f}"
            if len(results) == 1:
                runs = [s["methods"][method][str(count)] for s in results[0]["splits"]]
                scale = math.exp(np.mean([math.log(run["scale"]) for run in runs]))
                text += f" ({100 * np.mean([run['std'] for run in runs]):.1f}, {scale:.2g})"
            rows[-1].append(text)
    return report.table(["method", *(f"M = {count}" for count in COUNTS)], rows)


def plot(results: Results, path: Path) -> None:
    """Draws a panel per data set and one for their mean, with a curve per method; the exact kernel is dashed."""
    parts = {name: [result] for name, result in results.items()} | {MEAN: list(results.values())}
    figure, named = panels_by_name(list(parts), "M", "test accuracy, %")
    for name, axes in named.items():
        for method, style in styles(METHODS, (RBF_SAMPLER, "trig")).items():
            axes.plot(COUNTS, curve(parts[name], method), marker=".", label=method, **style)
        exact = _percent(parts[name], "exact")
        axes.axhline(exact, color="black", linewidth=0.8, linestyle="--", label="exact kernel")
        axes.set_xscale("log", base=2)
        axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    save(figure, path, axes)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.kernel_classification", __doc__)
    add = parser.add_argument
    add("--data_dir", type=Path, help="folder of data files; default: scikit-learn's bundled sets")
    add("--datasets", nargs="+", help="data sets; default: the eight UCI sets, without a folder the bundled ones")
    add("--shuffles", type=int, default=1, help="shuffles of each data set; results are their mean")
    add_results(parser, "kernel_classification")
    arguments = parser.parse_args(argv)
    if arguments.shuffles < 1:
        parser.error("--shuffles must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    arguments = parse_arguments(argv)
    results = {}
    for name in arguments.datasets or (UCI if arguments.data_dir else BUNDLED):
        dataset = load(name, arguments.data_dir)
        splits = [evaluate(dataset.shuffled(seed)) for seed in range(arguments.shuffles)]
        shape = {"rows": len(dataset.labels), "dim": dataset.x.shape[1], "classes": dataset.classes}
        results[name] = {**shape, "splits": splits}
        print(f"{name}: " + "\n".join(_table([results[name]])), flush=True)
    plot(results, arguments.output_dir / f"{arguments.name}.png")
    packages = ("scikit-learn", "numpy")
    content = report.context_of("favor.eval.papers.kernel_classification", argv, packages, ["--data_dir"])
    content |= {"feature_seeds": DRAWS, "scales": SCALES, "num_features": COUNTS, "datasets": results}
    return report.finish(arguments, report_lines(results, arguments.shuffles), content, checks(results))


cli = program("favor.eval.papers.kernel_classification", main)


if __name__ == "__main__":
    cli()
