"""Variance of random features by regime and scale: Figure 2 of the FAVOR# paper, from closed forms.

    python -m favor.eval.papers.variance --images_dir DIR

For two sets of L vectors the parameters of each family are fitted to the pair of sets. The curves are the mean of
log(Var / K^2), M = 1, over all pairs of vectors and over several pairs of sets; less is better. (The paper prints
Var / K: its curves are shifted by the mean of x.y, equally for all families.) Only the data are sampled. Six regimes:

- normal: x, y ~ N(0, sigma^2 I); sphere: uniform on the sphere of radius sigma; heterogen: x ~ N(0, sigma^2 I) and
  y ~ N(sigma 1, sigma^2 I);
- mnist, cifar10: grey images in [0, 1], resized to 8 x 8 by averaging over the area of each new pixel, flattened, times
  sigma, 2 L different images for a pair of sets; mnist/cifar10: x from the first, y from the second.

DIR holds `mnist_10k.npz` (array x_train) and `cifar10_gray_6k.npz` (array x), both `[n, height, width]` uint8. Without
it scikit-learn's bundled digits (8 x 8) stand in for MNIST and 32 x 32 crops of its two photographs for CIFAR-10.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from favor import features
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.papers.common import panels_by_name, save, styles
from favor.eval.papers.datasets import read_images
from favor.train.common.program import Parser, program

REGIMES = ("normal", "sphere", "heterogen", "mnist", "cifar10", "mnist/cifar10")
SIGMAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
SETS, VECTORS, SEED = 5, 1024, 0  # pairs of sets per regime, vectors of a set
SIZE = 8
DIM = SIZE * SIZE
FILES = {"mnist": ("mnist_10k.npz", "x_train"), "cifar10": ("cifar10_gray_6k.npz", "x")}
TRIG = ("trig (phase)", "trig (sin/cos)")
# Almost unregularised: without this a pixel that is always 0 would make the second moments singular.
RIDGE = 1e-8
FAMILIES: dict[str, features.PositiveFeatures] = {
    "pos": features.PosRF(),
    "gerf": features.GERF(),
    "saderf": features.SADERF(regularization=RIDGE, floor=0.0),
    "aderf": features.ADERF(regularization=RIDGE, floor=0.0),
    "sderf": features.SDERF(),
    "cderf": features.CDERF(regularization=RIDGE, floor=0.0),
}
METHODS = (*TRIG, *FAMILIES)
# Regime, method, and the distance below gerf at sigma = 1 that the paper reads off its figure ("about e^5").
GAINS = (
    ("heterogen", "sderf", 5.0),
    ("mnist", "sderf", 5.0),
    ("cifar10", "sderf", 10.0),
    ("mnist/cifar10", "sderf", 5.0),
    ("mnist/cifar10", "aderf", 3.0),
)

Table = dict[str, dict[str, list[float]]]  # by regime, method and sigma


def resize(images: np.ndarray, size: int = SIZE) -> np.ndarray:
    """Resizes images `[n, height, width]` to `[n, size, size]`; a new pixel is the mean over the area it covers."""

    def weights(length: int) -> np.ndarray:
        edges = np.arange(size + 1) * length / size
        starts = np.arange(length)
        covered = np.minimum(edges[1:, None], starts + 1) - np.maximum(edges[:-1, None], starts)
        return np.clip(covered, 0, None) * size / length

    rows, columns = weights(images.shape[-2]), weights(images.shape[-1])
    return rows @ np.asarray(images, dtype=np.float64) @ columns.T


def load_images(folder: Path | None) -> tuple[dict[str, Tensor], str]:
    """Loads images `[n, 64]` in [0, 1] under the names "mnist" and "cifar10", and a text about their source."""
    if folder is None:
        source = np.random.default_rng(0)
        photos = [photo.mean(-1) for photo in load_sample_images().images]
        patches = []
        for number in range(4096):
            photo = photos[number % len(photos)]
            top, left = (source.integers(0, length - 31) for length in photo.shape)
            patches.append(photo[top : top + 32, left : left + 32])
        crops = torch.from_numpy(resize(np.stack(patches)) / 255).flatten(1)
        return {"mnist": torch.from_numpy(load_digits().data / 16), "cifar10": crops}, (
            "No image folder was given: scikit-learn's digits (8 x 8) stand in for MNIST, random 32 x 32 grey crops of "
            "its two sample photographs for CIFAR-10."
        )
    read = {name: resize(read_images(folder, *file)[0]).reshape(-1, DIM) / 255 for name, file in FILES.items()}
    counts = ", ".join(f"{FILES[name][0]} ({len(x)} images)" for name, x in read.items())
    return {name: torch.from_numpy(x) for name, x in read.items()}, f"Images: {counts}."


def draw_sets(regime: str, length: int, images: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws two sets `[length, 64]` at sigma = 1; every regime is proportional to sigma.

    Two sets of images of one kind share no image, if there are at least 2 * length of them.
    """
    if regime == "mnist/cifar10":
        return _choose(images["mnist"], length, generator), _choose(images["cifar10"], length, generator)
    if regime in images:
        both = _choose(images[regime], 2 * length, generator)
        return both[:length], both[length:]
    x, y = torch.randn(2, length, DIM, dtype=torch.float64, generator=generator)
    if regime == "sphere":
        return x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
    return x, y + 1 if regime == "heterogen" else y


def _choose(images: Tensor, wanted: int, generator: torch.Generator) -> Tensor:
    """Chooses `wanted` images; none comes twice before all have come once."""
    rounds = [torch.randperm(len(images), generator=generator) for _ in range(math.ceil(wanted / len(images)))]
    return images[torch.cat(rounds)[:wanted]]


def log_relative_variance(name: str, x: Tensor, y: Tensor) -> Tensor:
    """Computes log(Var / K^2) of one feature with parameters fitted to two sets `[L, d]` and `[S, d]`, `[L, S]`.

    The sin/cos pair makes two features of one direction. For an equal number of features its value is therefore that
    of twice the variance of a direction.
    """
    if name in TRIG:
        r = _squared_distance(x, -y)
        if name == "trig (phase)":  # log(e^r + e^-r/2 - 1)
            return torch.where(r > 1, r, 0) + torch.where(
                r > 1, torch.log1p((-2 * r).exp() / 2 - (-r).exp()), (torch.expm1(r) + (-r).exp() / 2).log()
            )
        return r + 2 * torch.log(-torch.expm1(-r))  # e^r - 2 + e^-r = e^r (1 - e^-r)^2
    rf = FAMILIES[name]
    params = rf.fit(x, y)
    sigma = params.sigma
    eye = torch.eye(DIM, dtype=sigma.dtype)
    cholesky = torch.linalg.cholesky(2 * sigma - eye)
    # z'(2 Sigma - I)^-1 z with z = a_i + b_j: the rows a and b are solved for, not the L S sums.
    half_x, half_y = (
        torch.linalg.solve_triangular(cholesky, rows.T, upper=False).T
        for rows in (params.map_queries(x), params.map_keys(y))
    )
    constant = params.log_det_sigma - torch.diagonal(cholesky).log().sum()
    relative = (constant + _squared_distance(half_x, half_y)).clamp(min=torch.finfo(x.dtype).tiny)
    return relative + torch.log(-torch.expm1(-relative))


def _squared_distance(x: Tensor, y: Tensor) -> Tensor:
    """Computes |x_i + y_j|^2, at least a tiny positive number, so that its logarithm is finite."""
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1)
    return (squares + 2 * x @ y.T).clamp(min=torch.finfo(x.dtype).tiny)


def measure(images: dict[str, Tensor]) -> Table:
    """Computes the means of log(Var/K^2), and prints them; the sets of a regime are equal at every sigma."""
    results: Table = {}
    for number, regime in enumerate(REGIMES):
        generator = torch.Generator().manual_seed(SEED * len(REGIMES) + number)
        pairs = [draw_sets(regime, VECTORS, images, generator) for _ in range(SETS)]
        results[regime] = {
            name: [
                sum(log_relative_variance(name, sigma * x, sigma * y).mean().item() for x, y in pairs) / SETS
                for sigma in SIGMAS
            ]
            for name in METHODS
        }
        shown = (f"{name} {row[0]:.3f} to {row[-1]:.3f}" for name, row in results[regime].items())
        print(f"{regime}: {', '.join(shown)}", flush=True)
    return results


def checks(results: Table) -> list[report.Check]:
    """Checks the paper's statements about Figure 2, and a statement about cderf, with the numbers found."""
    excess = {
        (regime, sigma): row["cderf"][i] - min(row[name][i] for name in FAMILIES)
        for regime, row in results.items()
        for i, sigma in enumerate(SIGMAS)
        if sigma > 0.299
    }
    worst = max(excess, key=lambda cell: excess[cell])
    statement = "cderf is the lowest positive feature, or within 0.05 of it, in every cell with sigma >= 0.3"
    numbers = f"largest excess {excess[worst]:.4f}, {worst[0]} at sigma = {worst[1]:g}"
    found = [report.Check(statement, numbers, excess[worst] <= 0.05)]
    for regime, method, gain in (row for row in GAINS if row[0] in results):
        found_gain = results[regime]["gerf"][-1] - results[regime][method][-1]
        statement = f"{regime}: {method} is below gerf by at least {gain:g} at sigma = 1, as in the paper"
        found.append(report.Check(statement, f"{found_gain:.2f}", found_gain >= gain))
    return found


def report_lines(results: Table, source: str) -> list[str]:
    """Writes the Markdown report: one section per regime, one row per sigma; the lowest positive feature is bold."""
    lines = [
        "# Variance of random features (Figure 2 of the FAVOR# paper)",
        "",
        f"Mean of log(Var / K^2) over all pairs of vectors, M = 1, d = {DIM}, {SETS} pairs of sets of L = {VECTORS}, "
        f"seed {SEED}. Closed-form variances in float64 with parameters fitted to each pair of sets; only the data are "
        "sampled. Bold: the lowest positive feature of a row.",
        f"{source} Images are in [0, 1], resized to 8 x 8 by area averaging, times sigma. saderf, aderf and cderf: "
        f"regularization {RIDGE:g}, floor 0. sin/cos at an equal number "
        "of features: twice the variance of a direction. cderf is not in the paper.",
    ]
    for regime, row in results.items():
        body = []
        for i, sigma in enumerate(SIGMAS):
            lowest = min(row[name][i] for name in FAMILIES)
            stars = ["**" * (name in FAMILIES and row[name][i] == lowest) for name in METHODS]
            body.append([f"{sigma:.1f}", *(f"{s}{row[n][i]:.3f}{s}" for n, s in zip(METHODS, stars, strict=True))])
        lines += ["", f"## {regime}", "", *report.table(["sigma", *METHODS], body)]
    return lines


def plot(results: Table, path: Path) -> None:
    """Draws one panel per regime, with one curve per method."""
    figure, named = panels_by_name(list(results), "sigma", "mean log(Var / K²)")
    for regime, axes in named.items():
        for name, style in styles(METHODS, TRIG).items():
            axes.plot(SIGMAS, results[regime][name], marker=".", label=name, **style)
    save(figure, path, axes, columns=8)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.papers.variance", __doc__)
    parser.add_argument("--images_dir", type=Path, help="folder of the two npz files; default: scikit-learn's images")
    add_results(parser, "variance")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code, 1 if a check does not hold."""
    arguments = parse_arguments(argv)
    images, source = load_images(arguments.images_dir)
    results = measure(images)
    plot(results, arguments.output_dir / f"{arguments.name}.png")
    packages = ("scikit-learn", "numpy")
    content = report.context_of("favor.eval.papers.variance", argv, packages, ["--images_dir"])
    content |= {"sets": SETS, "length": VECTORS, "seed": SEED, "images": source, "sigmas": SIGMAS}
    content["log_relative_variance"] = results
    return report.finish(arguments, report_lines(results, source), content, checks(results))


cli = program("favor.eval.papers.variance", main)


if __name__ == "__main__":
    cli()
