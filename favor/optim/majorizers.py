"""Upper bounds on the curvature of a mini-batch that are cheap to invert.

The bound of `favor.optim.bound` gives a batch of inputs x_j with weights w_j the curvature Sigma = sum_j w_j B_j (x)
x_j x_j', an (n d) x (n d) matrix for n labels and d inputs. All functions here take the inputs `[m, d]` and logits
`[m, n]`, with weights `[m]` that default to 1/m, and return something with `solve(gradient, damping)` for a gradient
`[n, d]`.

| function | labels | certified | cost |
| --- | --- | --- | --- |
| `bohning` | 1/2 I | for the loss, at every weight | m d^2 + d^3 |
| `spectral` | P = I - 11'/n, inputs weighted by largest eigenvalues | above Sigma | m n^3 |
| `gershgorin` | diagonal, inputs reweighted | above Sigma | m n |
| `scaled` | as `gershgorin`, with tighter weights | above Sigma | m n^3 |
| `mean` | mean of B_j, inputs reweighted | above Sigma | m n^3 |
| `block` | one d x d matrix per label | above Sigma | m n d^2 + n d^3 |
| `diagonal` | gamma times the mean diagonal of B_j | no; gamma = 2 is short on clustered inputs | m n log n |
| `kfac` | mean of B_j | no | m n^2 + n^3 |
| `geometric` | square root of mean p (1 - p), diagonal | no: a heuristic, not a bound | m n |

Certified means that a full-batch step of length 0 to 2 cannot increase the loss. A diagonal from row sums is above its
matrix by Gershgorin's theorem; 1/2 I is above the matrix 1/2 P of Bohning ("Multinomial logistic regression
algorithm", 1992) and has the same inverse on gradients of a softmax, whose rows sum to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from favor.optim.bound import bound_coefficients, bound_dense, bound_diagonal, bound_factor, bound_row_sums

ROUNDS = 5
MAX_LABELS = 2000
CHUNK = 1 << 22


@dataclass(frozen=True)
class Inverse:
    """(K + damping I)^{-1}: `apply` to a gradient `[n, d]`, and `degrees`, the trace of K (K + damping I)^{-1} / n.

    The second is how many of the d inputs are not damped away: d without damping, fewer with it.
    """

    apply: Callable[[Tensor], Tensor]
    degrees: float


@dataclass(frozen=True)
class Kronecker:
    """The matrix `labels (x) inputs`; `labels` is a number () or a diagonal `[n]` or `[n, n]`, `inputs` is `[d, d]`."""

    labels: Tensor
    inputs: Tensor

    def inverse(self, damping: float) -> Inverse:
        """Computes (labels (x) inputs + damping I)^{-1}; damping >= 0 must make it invertible."""
        if self.labels.ndim == 0:
            return self._of_inputs(damping)
        columns, right = _eigh(self.inputs)
        rows, left = _eigh(self.labels) if self.labels.ndim == 2 else (self.labels.double(), None)
        products = rows.unsqueeze(-1) * columns
        degrees = (products / (products + damping)).sum().item() / len(rows)

        def apply(gradient: Tensor) -> Tensor:
            turned, values = gradient @ right.to(gradient), (products + damping).to(gradient)
            if left is None:
                return turned / values @ right.T.to(gradient)
            return left.to(gradient) @ (left.T.to(gradient) @ turned / values) @ right.T.to(gradient)

        return Inverse(apply, degrees)

    def _of_inputs(self, damping: float) -> Inverse:
        inverse = torch.cholesky_inverse(cholesky(self.labels * self.inputs, damping))
        degrees = len(inverse) - damping * inverse.trace().item()
        return Inverse(lambda gradient: gradient @ inverse.to(gradient), degrees)

    def solve(self, gradient: Tensor, damping: float) -> Tensor:
        """Computes (labels (x) inputs + damping I)^{-1} gradient, `[n, d]`."""
        return self.inverse(damping).apply(gradient)

    def dense(self, num_labels: int) -> Tensor:
        """Forms the whole matrix, `[n d, n d]`."""
        labels = self.labels.expand(num_labels) if self.labels.ndim == 0 else self.labels
        return torch.kron(labels.diag() if labels.ndim == 1 else labels, self.inputs)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        return (self.labels.diagonal() if self.labels.ndim == 2 else self.labels).mean() * self.inputs.diagonal().mean()


@dataclass(frozen=True)
class RootKronecker(Kronecker):
    """The matrix `sqrt(labels) (x) inputs`, labels `[n]`: averages of its factors are under the root."""

    def _rooted(self) -> Kronecker:
        return Kronecker(self.labels.sqrt(), self.inputs)

    def inverse(self, damping: float) -> Inverse:
        """Computes (sqrt(labels) (x) inputs + damping I)^{-1}; damping >= 0 must make it invertible."""
        return self._rooted().inverse(damping)

    def dense(self, num_labels: int) -> Tensor:
        """Forms the whole matrix, `[n d, n d]`."""
        return self._rooted().dense(num_labels)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        return self._rooted().mean_eigenvalue()


@dataclass(frozen=True)
class Blocks:
    """A block-diagonal matrix, `blocks` `[n, d, d]`."""

    blocks: Tensor

    def inverse(self, damping: float) -> Inverse:
        """Computes (blocks + damping I)^{-1}."""
        inverse = torch.cholesky_inverse(cholesky(self.blocks, damping))
        degrees = inverse.shape[-1] - damping * inverse.diagonal(dim1=-2, dim2=-1).sum().item() / len(inverse)
        return Inverse(lambda g: (inverse.to(g) @ g.unsqueeze(-1)).squeeze(-1), degrees)

    def solve(self, gradient: Tensor, damping: float) -> Tensor:
        """Computes (blocks + damping I)^{-1} gradient, `[n, d]`."""
        return self.inverse(damping).apply(gradient)

    def dense(self, num_labels: int) -> Tensor:
        """Forms the whole matrix, `[n d, n d]`."""
        return torch.block_diag(*self.blocks)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        return self.blocks.diagonal(dim1=-2, dim2=-1).mean()


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Computes eigenvalues, none below 0, and eigenvectors in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp_min(0), vectors


def cholesky(matrix: Tensor, damping: float) -> Tensor:
    """Factors matrix + damping I in float64, lower `[..., d, d]`, for matrices without negative eigenvalues.

    If rounding gave a matrix eigenvalues below -damping, the size of the rounding is added to the diagonal: a matrix
    above an upper bound is one too.

    Raises:
        ValueError: if the matrix is not finite.
    """
    wide, size = matrix.double(), matrix.shape[-1]
    eye = torch.eye(size, dtype=torch.float64, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(wide + damping * eye)
    if bool(failed.any()):
        largest = wide.diagonal(dim1=-2, dim2=-1).amax(-1)
        added = damping + 4 * size * torch.finfo(matrix.dtype).eps * largest
        factor, failed = torch.linalg.cholesky_ex(wide + added[..., None, None] * eye)
    if bool(failed.any()) or not bool(factor.isfinite().all()):
        raise ValueError(
            f"curvature must be finite and not negative, its largest entry is {wide.abs().max().item():.3g}: scale the "
            "inputs of the head to a size near 1, or look for NaN and infinity in them."
        )
    return factor


def row_weights(x: Tensor, weights: Tensor | None) -> Tensor:
    """Gives the weights `[m]`, 1/m each by default."""
    return x.new_full((len(x),), 1 / len(x)) if weights is None else weights


def total(weights: Tensor) -> Tensor:
    """Gives the sum of weights, never 0: means over no rows are 0."""
    return weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def second_moment(x: Tensor, weights: Tensor) -> Tensor:
    """Computes the sum of w_j x_j x_j', `[d, d]`."""
    return (x * weights.unsqueeze(-1)).T @ x


def _check_labels(name: str, logits: Tensor) -> None:
    if logits.shape[-1] > MAX_LABELS:
        raise ValueError(
            f"curvature {name!r} takes up to {MAX_LABELS} labels, got {logits.shape[-1]}: use 'bohning' or 'diag'."
        )


def _largest(matrices: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrices)[..., -1]


def bohning(logits: Tensor | None, x: Tensor, weights: Tensor | None = None) -> Kronecker:
    """Gives 1/2 I (x) X'X: above the Hessian of the loss at every weight. Does not depend on the logits."""
    return Kronecker(x.new_tensor(0.5), second_moment(x, row_weights(x, weights)))


def spectral(logits: Tensor, x: Tensor, weights: Tensor | None = None) -> Kronecker:
    """Gives (I - 11'/n) (x) sum_j w_j lmax(B_j) x_j x_j', labels ascending; exact for two labels."""
    _check_labels("spectral", logits)
    top = _largest(bound_dense(bound_coefficients(logits))).clamp_min(0)
    n = logits.shape[-1]
    centre = torch.eye(n, dtype=x.dtype, device=x.device) - 1 / n
    return Kronecker(centre, second_moment(x, row_weights(x, weights) * top.to(x)))


def gershgorin(logits: Tensor, x: Tensor, weights: Tensor | None = None) -> Kronecker:
    """Gives diag(D) (x) sum_j w_j c_j x_j x_j' with c_j D >= row sums of |B_j| for every j, labels ascending."""
    sums = bound_row_sums(bound_coefficients(logits))
    common = _common_diagonal(sums)
    factors = (sums / common).amax(-1)
    return Kronecker(common.to(x), second_moment(x, row_weights(x, weights) * factors.to(x)))


def _common_diagonal(sums: Tensor) -> Tensor:
    """Finds D `[n]` whose multiples c_j D cover all rows of sums `[m, n]` closely, by alternating maxima."""
    tiny = torch.finfo(sums.dtype).tiny
    common = sums.mean(0).clamp_min(tiny)
    for _ in range(ROUNDS):
        factors = (sums / common).amax(-1, keepdim=True).clamp_min(tiny)
        common = (sums / factors).amax(0).clamp_min(tiny)
    return common


def scaled(logits: Tensor, x: Tensor, weights: Tensor | None = None) -> Kronecker:
    """Gives `gershgorin` with c_j the largest eigenvalue of D^{-1/2} B_j D^{-1/2}."""
    _check_labels("scaled", logits)
    c = bound_coefficients(logits)
    common = _common_diagonal(bound_row_sums(c))
    factor = bound_factor(c) / common.sqrt()
    return Kronecker(common.to(x), second_moment(x, row_weights(x, weights) * _squared_norm(factor).to(x)))


def _squared_norm(factor: Tensor) -> Tensor:
    """Computes the largest eigenvalue of F'F for F `[..., k, n]`."""
    return _largest(factor.mT @ factor).clamp_min(0)


def mean(logits: Tensor, x: Tensor, weights: Tensor | None = None) -> Kronecker:
    """Gives C (x) sum_j w_j c_j x_j x_j', C the weighted mean of B_j, c_j its largest eigenvalue relative to C."""
    _check_labels("mean", logits)
    w = row_weights(x, weights)
    factor = bound_factor(bound_coefficients(logits))
    centre = torch.einsum("m,mkn,mkp->np", w.to(factor), factor, factor) / total(w)
    values, vectors = torch.linalg.eigh(centre)
    if len(values) == 1:
        return Kronecker(centre.to(x), torch.zeros_like(second_moment(x, w)))
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    root = vectors[:, kept] * values[kept].rsqrt()
    return Kronecker(centre.to(x), second_moment(x, w * _squared_norm(factor @ root).to(x)))


def block(logits: Tensor, x: Tensor, weights: Tensor | None = None) -> Blocks:
    """Gives sum_j w_j R_j[y] x_j x_j' for label y, with R_j the row sums of |B_j|, labels ascending."""
    _check_labels("block", logits)
    sums = bound_row_sums(bound_coefficients(logits)).to(x) * row_weights(x, weights).unsqueeze(-1)
    return Blocks(torch.stack([second_moment(x, column) for column in sums.unbind(-1)]))


def diagonal(
    logits: Tensor, x: Tensor, weights: Tensor | None = None, *, order: str = "ascending", gamma: float = 2.0
) -> Kronecker:
    """Gives gamma diag(mean_j B_j) (x) X'X, labels ascending; gamma = 2 (1.9 on digits; clusters needed up to 2.8)."""
    w = row_weights(x, weights)
    rows = max(1, CHUNK // logits.shape[-1])
    parts = zip(logits.split(rows), w.split(rows), strict=True)
    labels = torch.stack([part.to(a) @ bound_diagonal(bound_coefficients(a, order)) for a, part in parts]).sum(0)
    return Kronecker(gamma * labels.to(x) / total(w), second_moment(x, w))


def kfac(logits: Tensor, x: Tensor, weights: Tensor | None = None, *, order: str = "descending") -> Kronecker:
    """Gives mean_j B_j (x) X'X, labels descending: not a bound; fast on full batches, but it can diverge."""
    _check_labels("kfac", logits)
    w = row_weights(x, weights)
    rows = max(1, CHUNK // logits.shape[-1] ** 2)
    labels = x.new_zeros(logits.shape[-1], logits.shape[-1])
    for a, part in zip(logits.split(rows), w.split(rows), strict=True):
        factor = bound_factor(bound_coefficients(a, order)) * part.sqrt().to(x)[:, None, None]
        labels += factor.flatten(0, 1).T @ factor.flatten(0, 1)
    return Kronecker(labels / total(w), second_moment(x, w))


def geometric(logits: Tensor, x: Tensor, weights: Tensor | None = None) -> RootKronecker:
    """Gives diag(sqrt(v)) (x) X'X, v = mean_j p_j (1 - p_j) with the softmax p_j: a heuristic, not a bound.

    For every label sqrt(v) is the geometric mean of two: 2 v, the mean over rows of Gershgorin's bound on the Hessian
    of log Z where the logits are now, and Bohning's 1/2, which holds for all logits. For a rare label the first is far
    too small as soon as its logit grows, and the second far too large until then. Nothing certifies what is
    between them: a full-batch step of length 1 can increase the loss.
    """
    w = row_weights(x, weights)
    rows = max(1, CHUNK // logits.shape[-1])
    variance = x.new_zeros(logits.shape[-1])
    for a, part in zip(logits.split(rows), w.split(rows), strict=True):
        p = a.softmax(-1)
        variance += part.to(p) @ (p * (1 - p))
    return RootKronecker(variance / total(w), second_moment(x, w))


CERTIFIED = ("bohning", "spectral", "block")
MAJORIZERS: dict[str, Callable[..., Kronecker | Blocks]] = {
    "bohning": bohning,
    "spectral": spectral,
    "block": block,
    "diag": diagonal,
    "kfac": kfac,
}
HEURISTICS: dict[str, Callable[..., Kronecker]] = {"geometric": geometric}


def majorize(name: str, theta: Tensor, x: Tensor, weights: Tensor, order: str | None = None) -> Kronecker | Blocks:
    """Makes a majorizer or heuristic by name at theta `[n, d]`; an order is for diag and kfac."""
    options = {} if order is None else {"order": order}
    return (MAJORIZERS | HEURISTICS)[name](None if name == "bohning" else x @ theta.T, x, weights, **options)


def averaged(curvature: Kronecker | Blocks, total: Tensor, reduce: Callable[[Tensor], Tensor]) -> Kronecker | Blocks:
    """Averages the curvature over all processes.

    Args:
        curvature: of this process.
        total: sum of its weights, (); 0 without rows.
        reduce: mean over processes, in place.
    """
    if isinstance(curvature, Blocks):
        return Blocks(reduce(curvature.blocks))
    labels, inputs = curvature.labels, reduce(curvature.inputs)
    if labels.ndim:
        # Labels are a mean over rows already, in which processes without rows must not count.
        labels = reduce(labels * total) / reduce(total.clone())
    return replace(curvature, labels=labels, inputs=inputs)
