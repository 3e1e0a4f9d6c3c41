"""Kernel classification with random features: Figure 3 of the FAVOR# paper.

    python -m favor.eval.papers.kernel_classification --data_dir DIR
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
import sys
import time
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
from favor.eval.papers.datasets import BUNDLED, UCI, Dataset, load, split
from favor.train.common.program import Parser, program

POSITIVE = ("pos", "gerf", "saderf", "aderf", "sderf", "cderf")
RBF_SAMPLER = "RBFSampler"
METHODS = (RBF_SAMPLER, "trig", *POSITIVE)

Results = Mapping[str, Mapping[str, Any]]
MEAN = "mean over data sets"
SIGNED = {"RBFSampler": "--", "trig": ":"}  # line styles of methods without positive features


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.kernel_classification", __doc__)
    parser.add_argument("--data_dir", type=Path, help="folder of data files; default: scikit-learn's bundled sets")
    parser.add_argument(
        "--datasets", nargs="+", help="data sets; default: the eight UCI sets, without a folder the bundled ones"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help="methods to compare"
    )
    parser.add_argument(
        "--num_features", type=int, nargs="+", default=[16, 32, 64, 128], metavar="M", help="numbers of random features"
    )
    parser.add_argument(
        "--scales", type=float, nargs="+", metavar="S", help="factors s of the inputs; default: ten from 0.01 to 100"
    )
    parser.add_argument(
        "--feature_seeds", type=int, default=50, help="draws of the features, in validation and in test"
    )
    parser.add_argument("--shuffles", type=int, default=1, help="shuffles of each data set; results are their mean")
    parser.add_argument("--max_rows", type=int, default=0, help="rows of a data set that are used; 0 (default): all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first shuffle")
    add_results(parser, "kernel_classification")
    arguments = parser.parse_args(argv)
    arguments.scales = arguments.scales or list(np.logspace(-2, 2, 10))

    arguments.datasets = arguments.datasets or list(UCI if arguments.data_dir else BUNDLED)
    arguments.num_features = sorted(arguments.num_features)
    if any(count < 2 or count % 2 for count in arguments.num_features):
        parser.error("--num_features must be even: sin/cos and opposite directions come in pairs")
    if min(arguments.feature_seeds, arguments.shuffles) < 1 or min(arguments.scales) <= 0:
        parser.error("--feature_seeds and --shuffles must be at least 1, and --scales positive")
    return arguments


ALPHA = -0.5
CHUNK = 1 << 20  # feature values computed at once, so that they stay in cache
FIRST_TEST_SEED = 1 << 20

Votes = tuple[Tensor, Tensor]


def columns_of(method: str, count: int, largest: int) -> Tensor:
    """Selects `count` features from a draw of `largest`; opposite directions and sin/cos pairs stay together."""
    paired = method == "trig" or (method in POSITIVE and features.get(method).antithetic)
    if not paired:
        return torch.arange(count)
    half = torch.arange(count // 2)
    return torch.cat((half, largest // 2 + half))


def accuracies(
    method: str, x: Tensor, y: Tensor, targets: Tensor, onehot: Tensor, counts: Sequence[int], seeds: Sequence[int]
) -> np.ndarray:
    """Computes the accuracy of the classifier for every number of features and seed, `[len(counts), len(seeds)]`.

    Args:
        method: one of METHODS.
        x: queries `[Q, d]` times s, float64.
        y: training inputs `[N, d]` times s, float64.
        targets: labels of the queries, `[Q]`.
        onehot: labels of the training inputs, `[N, C]` float32.
        counts: numbers of features; even for "trig" and for families with opposite pairs.
        seeds: one draw per seed.
    """
    largest = max(counts)
    picks = [columns_of(method, count, largest) for count in counts]
    found = np.empty((len(counts), len(seeds)))
    predict = positive_scores(method, x, y, onehot, largest) if method in POSITIVE else None
    for i, seed in enumerate(seeds):
        # One seed at a time: then the large matrix, training set by features, stays in cache.
        scores = predict if predict is not None else signed_scores(method, x, y, onehot, largest)
        for j, result in enumerate(scores(seed, picks)):
            found[j, i] = (result.argmax(-1) == targets).double().mean().item()
    return found


def positive_scores(
    method: str, x: Tensor, y: Tensor, onehot: Tensor, largest: int
) -> Callable[[int, Sequence[Tensor]], list[Tensor]]:
    """Makes the function that scores a draw of positive features, `[Q, C]`, up to a positive factor of each query.

    Logarithms of features leave out the part that depends on the query alone. For each feature, the largest logarithm
    over the training set is subtracted there and added to that of the queries. Then, for each query, the largest
    logarithm over features is subtracted: nothing overflows, and the greatest feature of a query is 1.

    Args:
        method: one of POSITIVE.
        x: queries `[Q, d]`.
        y: training inputs `[N, d]`.
        onehot: labels of the training inputs, `[N, C]`.
        largest: number of features of a draw.
    """
    rf = features.get(method, alpha=ALPHA)
    assert isinstance(rf, features.PositiveFeatures)
    params = rf.fit(x, y)
    ones = y.new_ones(len(y), 1)
    # Two more columns add a bias per row and a bias per feature within the matrix product.
    keys = torch.cat((y, rf.key_bias(y, params).unsqueeze(-1), ones), dim=-1).float()
    queries = x.float()

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
        log_query = queries @ to_query.float().T + torch.cat(top)
        results = []
        for pick in picks:
            logs = log_query[:, pick]
            results.append((logs - logs.amax(-1, keepdim=True)).exp() @ vote[pick])
        return results

    return scores


def signed_scores(
    method: str, x: Tensor, y: Tensor, onehot: Tensor, largest: int
) -> Callable[[int, Sequence[Tensor]], list[Tensor]]:
    """Makes the function that scores a draw of trigonometric features or of scikit-learn's RBFSampler, `[Q, C]`.

    Args:
        method: "trig" or RBF_SAMPLER.
        x: queries `[Q, d]`.
        y: training inputs `[N, d]`.
        onehot: labels of the training inputs, `[N, C]`.
        largest: number of features of a draw.
    """
    queries, keys = x.float(), y.float()

    def scores(seed: int, picks: Sequence[Tensor]) -> list[Tensor]:
        if method == RBF_SAMPLER:
            sampler = RBFSampler(gamma=0.5, n_components=largest, random_state=seed).fit(queries[:1].numpy())
            phi_x, phi_y = (torch.from_numpy(sampler.transform(rows.numpy())) for rows in (queries, keys))
        else:
            rf = features.TrigRF(alpha=ALPHA)
            omega = rf.draw(largest, x.shape[-1], generator=torch.Generator().manual_seed(seed)).float()
            phi_x, phi_y = rf.phi(queries, omega), rf.phi(keys, omega)
        vote = phi_y.T @ onehot
        return [phi_x[:, pick] @ vote[pick] for pick in picks]

    return scores


def exact_accuracy(x: Tensor, y: Tensor, targets: Tensor, onehot: Tensor) -> float:
    """Computes the accuracy with the kernel itself.

    Args:
        x: queries `[Q, d]`.
        y: training inputs `[N, d]`.
        targets: labels of the queries, `[Q]`.
        onehot: labels of the training inputs, `[N, C]`.
    """
    right = 0
    for rows, labels in zip(x.split(256), targets.split(256), strict=True):
        # |x|^2 does not change the order of a query's scores.
        logits = rows @ y.T - y.square().sum(-1) / 2
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        right += int(((weights @ onehot.double()).argmax(-1) == labels).sum())
    return right / len(x)


def evaluate(
    dataset: Dataset, scales: Sequence[float], counts: Sequence[int], seeds: int, methods: Sequence[str]
) -> dict[str, Any]:
    """Evaluates all methods on one split of one data set, whose rows are already in random order.

    Args:
        dataset: the data set.
        scales: factors of the inputs to choose from.
        counts: numbers of features.
        seeds: number of draws.
        methods: names of METHODS.

    Returns:
        "exact": scale and test accuracy of the kernel; "majority": test accuracy of the commonest training class;
        "methods": {method: {M: {"scale", "validation", "test" (mean), "std" (over draws)}}}.
    """
    inputs, labels = split(dataset)
    parts = {name: torch.from_numpy(rows) for name, rows in inputs.items()}
    targets = {name: torch.from_numpy(values) for name, values in labels.items()}
    onehot = torch.nn.functional.one_hot(targets["train"], dataset.classes).float()

    def run(method: str, part: str, scale: float, first_seed: int) -> np.ndarray:
        draws = range(first_seed, first_seed + seeds)
        x, y = scale * parts[part], scale * parts["train"]
        return accuracies(method, x, y, targets[part], onehot, counts, draws)

    exact = [exact_accuracy(s * parts["validation"], s * parts["train"], targets["validation"], onehot) for s in scales]
    best = scales[int(np.argmax(exact))]
    result: dict[str, Any] = {
        "sizes": {name: len(rows) for name, rows in inputs.items()},
        "exact": {
            "scale": best,
            "test": exact_accuracy(best * parts["test"], best * parts["train"], targets["test"], onehot),
        },
        "majority": float((targets["test"] == onehot.sum(0).argmax()).double().mean()),
        "methods": {},
    }
    for method in methods:
        validation = np.stack([run(method, "validation", s, 0).mean(-1) for s in scales])  # [scales, counts]
        chosen = validation.argmax(0)
        test = {number: run(method, "test", scales[number], FIRST_TEST_SEED) for number in set(chosen.tolist())}
        result["methods"][method] = {
            str(count): {
                "scale": scales[number],
                "validation": float(validation[number, i]),
                "test": float(test[number][i].mean()),
                "std": float(test[number][i].std(ddof=1)) if seeds > 1 else 0.0,
            }
            for i, (count, number) in enumerate(zip(counts, chosen.tolist(), strict=True))
        }
    return result


def methods_of(results: Results) -> list[str]:
    """Lists the methods in the order in which they ran."""
    return list(next(iter(results.values()))["splits"][0]["methods"])


def accuracy(result: Mapping[str, Any], method: str, count: int) -> float:
    """Computes the test accuracy of one method on one data set, the mean over splits.

    Args:
        result: of the data set.
        method: name of the method.
        count: number of features.
    """
    return float(np.mean([split["methods"][method][str(count)]["test"] for split in result["splits"]]))


def mean_accuracy(results: Results, method: str, count: int) -> float:
    """Computes the test accuracy, the mean over data sets.

    Args:
        results: by data set.
        method: name of the method.
        count: number of features.
    """
    return float(np.mean([accuracy(result, method, count) for result in results.values()]))


def checks(results: Results, counts: Sequence[int]) -> list[report.Check]:
    """Checks that, on average over the data sets, cderf is at least as good as sderf, and sderf as gerf, at every M."""
    order = [name for name in ("cderf", "sderf", "gerf") if name in methods_of(results)]
    found = []
    for better, worse in itertools.pairwise(order):
        pairs = [[100 * mean_accuracy(results, method, count) for method in (better, worse)] for count in counts]
        numbers = ", ".join(f"M = {c}: {one:.2f} and {two:.2f}" for c, (one, two) in zip(counts, pairs, strict=True))
        statement = f"mean accuracy of {better} is at least that of {worse} at every M"
        found.append(report.Check(statement, numbers, all(one >= two for one, two in pairs)))
    return found


def report_lines(results: Results, counts: Sequence[int], arguments: argparse.Namespace) -> list[str]:
    """Writes the Markdown report: the mean over data sets, then one section per data set; the best of a column is bold.

    Args:
        results: by data set.
        counts: numbers of features.
        arguments: of the program.
    """
    lines = [
        "# Kernel classification with random features (Figure 3 of the FAVOR# paper)",
        "",
        *_settings(arguments),
        "",
        f"## {MEAN[0].upper()}{MEAN[1:]}",
        "",
        *_table({m: [mean_accuracy(results, m, c) for c in counts] for m in methods_of(results)}, None, counts),
    ]
    exact = np.mean([_mean(result, "exact") for result in results.values()])
    lines += [
        "",
        f"Exact kernel {100 * exact:.1f}, most common class "
        f"{100 * np.mean([_majority(result) for result in results.values()]):.1f}.",
    ]
    for name, result in results.items():
        sizes = result["splits"][0]["sizes"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{result['rows']} rows, {result['dim']} columns after encoding, {result['classes']} classes; "
            f"{sizes['train']} training, {sizes['validation']} validation, {sizes['test']} test rows. Exact kernel "
            f"{100 * _mean(result, 'exact'):.1f}, most common class {100 * _majority(result):.1f}. In brackets: "
            "standard deviation over draws, chosen s"
            + (" (both the mean, that of s geometric, over splits)." if arguments.shuffles > 1 else "."),
            "",
            *_table({m: [accuracy(result, m, c) for c in counts] for m in methods_of(results)}, result, counts),
        ]
    return lines


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Explains in words how the measurements were made."""
    splits = f"{arguments.shuffles} random splits, averaged" if arguments.shuffles > 1 else "one random split"
    used = f" The first {arguments.max_rows} rows after the shuffle are used." if arguments.max_rows else ""
    scales = f"{len(arguments.scales)} values, {min(arguments.scales):g} to {max(arguments.scales):g}"
    return [
        f"Test accuracy in %, Nadaraya-Watson with the Gaussian kernel exp(-s^2 |u - v|^2/2); 90/5/5, {splits}, seed "
        f"{arguments.seed}; {arguments.feature_seeds} draws of the features in validation and as many fresh ones in "
        f"test; s by validation from {scales}.{used} Columns that read as numbers are numbers, others one-hot (chess "
        "board files a-h are 1-8); every column is centred and scaled to unit variance on the training part.",
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


def _mean(result: Mapping[str, Any], key: str) -> float:
    return float(np.mean([split[key]["test"] for split in result["splits"]]))


def _majority(result: Mapping[str, Any]) -> float:
    return float(np.mean([split["majority"] for split in result["splits"]]))


def _table(values: dict[str, list[float]], result: Mapping[str, Any] | None, counts: Sequence[int]) -> list[str]:
    best = [max(row[i] for row in values.values()) for i in range(len(counts))]
    rows = []
    for method, row in values.items():
        cells = []
        for i, count in enumerate(counts):
            text = f"**{100 * row[i]:.1f}**" if row[i] == best[i] else f"{100 * row[i]:.1f}"
            if result is not None:
                runs = [split["methods"][method][str(count)] for split in result["splits"]]
                deviation = np.mean([run["std"] for run in runs])
                scale = math.exp(np.mean([math.log(run["scale"]) for run in runs]))
                text += f" ({100 * deviation:.1f}, {scale:.2g})"
            cells.append(text)
        rows.append([method, *cells])
    return report.table(["method", *(f"M = {count}" for count in counts)], rows)


def plot(results: Results, counts: Sequence[int], path: Path) -> None:
    """Draws a panel per data set and one for their mean, with a curve per method; the exact kernel is dashed.

    Args:
        results: by data set.
        counts: numbers of features.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, tuple[dict[str, list[float]], float]] = {
        name: ({m: [accuracy(result, m, c) for c in counts] for m in methods_of(results)}, _mean(result, "exact"))
        for name, result in results.items()
    }
    means = {m: [mean_accuracy(results, m, c) for c in counts] for m in methods_of(results)}
    panels[MEAN] = (means, float(np.mean([exact for _, exact in panels.values()])))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows + 0.6), squeeze=False, sharex=True, layout="constrained"
    )
    for axes, (name, (curves, exact)) in zip(grid.flat, panels.items(), strict=False):
        positive = [method for method in curves if method not in SIGNED]
        for method, values in curves.items():
            grey = {"color": "grey", "linestyle": SIGNED.get(method)}
            style = grey if method in SIGNED else {"color": f"C{positive.index(method)}"}
            axes.plot(counts, [100 * v for v in values], marker=".", label=method, **style)
        axes.axhline(100 * exact, color="black", linewidth=0.8, linestyle="--", label="exact kernel")
        axes.set_title(name, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("M")
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy, %")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(words)
    counts, results = arguments.num_features, {}
    start = time.perf_counter()
    for name in arguments.datasets:
        dataset = load(name, arguments.data_dir)
        found = []
        for number in range(arguments.shuffles):
            rows = dataset.shuffled(arguments.seed + number, arguments.max_rows)
            found.append(evaluate(rows, arguments.scales, counts, arguments.feature_seeds, arguments.methods))
        results[name] = {"rows": len(rows.labels), "dim": rows.x.shape[1], "classes": rows.classes, "splits": found}
        accuracy = {
            m: [np.mean([f["methods"][m][str(c)]["test"] for f in found]) for c in counts] for m in arguments.methods
        }
        print(f"{name}: exact {100 * np.mean([f['exact']['test'] for f in found]):.1f}", end="", flush=True)
        for method, values in accuracy.items():
            print(f"  {method} " + "/".join(f"{100 * value:.1f}" for value in values), end="")
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
    found_checks = checks(results, counts)
    command = report.shown_command("favor.eval.papers.kernel_classification", words, ["--data_dir"], ["--output_dir"])
    content: dict[str, Any] = {
        **report.context(command),
        "seed": arguments.seed,
        "feature_seeds": arguments.feature_seeds,
        "scales": arguments.scales,
        "num_features": counts,
        "seconds": time.perf_counter() - start,
        "datasets": results,
    }
    lines = report_lines(results, counts, arguments)
    report.write(arguments.output_dir, arguments.name, lines, content, found_checks)
    plot(results, counts, arguments.output_dir / f"{arguments.name}.png")
    print("\n".join(["", *lines, "", *(check.line() for check in found_checks)]))
    return int(not all(check.holds for check in found_checks))


cli = program("favor.eval.papers.kernel_classification", main)


if __name__ == "__main__":
    cli()
