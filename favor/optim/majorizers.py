"""The curvature of a mini-batch, exact or bounded by a matrix that is cheap to invert.

The bound of `favor.optim.bound` gives a batch of inputs x_j with weights w_j the curvature Sigma = sum_j w_j B_j (x)
x_j x_j', an (n d) x (n d) matrix for n labels and d inputs. All functions here take the inputs `[m, d]`, logits
`[m, n]` and weights `[m]`, and return something with `solve(gradient, damping)` for a gradient `[n, d]`.

| function | labels | certified | cost |
| --- | --- | --- | --- |
| `bohning` | 1/2 I | for the loss, at every weight | m d^2 + d^3 |
| `spectral` | P = I - 11'/n, inputs weighted by largest eigenvalues | above Sigma | m n^3 |
| `block` | one d x d matrix per label | above Sigma | m n d^2 + n d^3 |
| `diagonal` | gamma times the mean diagonal of B_j | no; gamma = 2 is short on clustered inputs | m n log n |
| `kfac` | mean of B_j | no | m n^2 + n^3 |
| `geometric` | square root of mean p (1 - p), diagonal | no: a heuristic, not a bound | m n |
| `exact` | Sigma itself | yes | conjugate gradients, m n d each |

Certified means that a full-batch step of length 0 to 2 cannot increase the loss. A diagonal from row sums is above its
matrix by Gershgorin's theorem; 1/2 I is above the matrix 1/2 P of Bohning ("Multinomial logistic regression
algorithm", 1992) and has the same inverse on gradients of a softmax, whose rows sum to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from favor.optim.bound import (
    BoundCoefficients,
    bound_coefficients,
    bound_dense,
    bound_diagonal,
    bound_factor,
    bound_matvec,
    bound_row_sums,
)

MAX_LABELS = 2000
CHUNK = 1 << 22
DENSE = 1e9  # operations up to which a system is solved by a dense factorization
TOLERANCE = 1e-6
ITERATIONS = 200

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Inverse:
    """(K + damping I)^{-1}: `apply` to a gradient `[n, d]`, and `degrees`, the trace of K (K + damping I)^{-1} / n.

    The second is how many of the d inputs are not damped away: d without damping, fewer with it.
    """

    apply: Callable[[Tensor], Tensor]
    degrees: float


class Curvature:
    """A matrix K `[n d, n d]`."""

    def inverse(self, damping: float) -> Inverse:
        """Computes (K + damping I)^{-1}; damping >= 0 must make it invertible."""
        raise NotImplementedError

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        raise NotImplementedError

    def solve(self, gradient: Tensor, damping: float) -> Tensor:
        """Computes (K + damping I)^{-1} gradient, `[n, d]`."""
        return self.inverse(damping).apply(gradient)


@dataclass(frozen=True)
class Kronecker(Curvature):
    """The matrix `labels (x) inputs`; `labels` is a number () or a diagonal `[n]` or `[n, n]`, `inputs` is `[d, d]`.

    With `root` it is `sqrt(labels) (x) inputs`, labels `[n]`: averages of its factors are under the root.
    """

    labels: Tensor
    inputs: Tensor
    root: bool = False

    @property
    def left(self) -> Tensor:
        """Gives the factor of labels, after the root."""
        return self.labels.sqrt() if self.root else self.labels

    def inverse(self, damping: float) -> Inverse:
        """Computes (labels (x) inputs + damping I)^{-1}; damping >= 0 must make it invertible."""
        if self.labels.ndim == 0:
            inverse = torch.cholesky_inverse(cholesky(self.labels * self.inputs, damping))
            degrees = len(inverse) - damping * inverse.trace().item()
            return Inverse(lambda gradient: gradient @ inverse.to(gradient), degrees)
        columns, right = _eigh(self.inputs)
        rows, left = _eigh(self.left) if self.labels.ndim == 2 else (self.left.double(), None)
        products = rows.unsqueeze(-1) * columns
        degrees = (products / (products + damping)).sum().item() / len(rows)

        def apply(gradient: Tensor) -> Tensor:
            turned, values = gradient @ right.to(gradient), (products + damping).to(gradient)
            if left is None:
                return turned / values @ right.T.to(gradient)
            return left.to(gradient) @ (left.T.to(gradient) @ turned / values) @ right.T.to(gradient)

        return Inverse(apply, degrees)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        return (self.left.diagonal() if self.labels.ndim == 2 else self.left).mean() * self.inputs.diagonal().mean()


@dataclass(frozen=True)
class Blocks(Curvature):
    """A block-diagonal matrix, `blocks` `[n, d, d]`."""

    blocks: Tensor

    def inverse(self, damping: float) -> Inverse:
        """Computes (blocks + damping I)^{-1}."""
        inverse = torch.cholesky_inverse(cholesky(self.blocks, damping))
        degrees = inverse.shape[-1] - damping * inverse.diagonal(dim1=-2, dim2=-1).sum().item() / len(inverse)
        return Inverse(lambda g: (inverse.to(g) @ g.unsqueeze(-1)).squeeze(-1), degrees)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        return self.blocks.diagonal(dim1=-2, dim2=-1).mean()


@dataclass(frozen=True)
class Exact(Curvature):
    """Sigma by inputs `[m, d]`, weights `[m]` and the coefficients of B for logits `[m, n]`.

    `reduce` is applied to every sum over examples; the mean over processes, for instance.
    """

    x: Tensor
    weights: Tensor
    coefficients: BoundCoefficients
    reduce: Reduce

    def matvec(self, v: Tensor) -> Tensor:
        """Computes Sigma v, `[n, d]` for v `[n, d]`."""
        product = bound_matvec(self.coefficients, self.x @ v.T) * self.weights.unsqueeze(-1)
        return self.reduce(product.T @ self.x)

    def dense(self, num_labels: int) -> Tensor:
        """Forms the whole matrix, `[n d, n d]`, from a few examples at a time."""
        n, d = num_labels, self.x.shape[-1]
        matrix = self.x.new_zeros(n * n, d * d)
        labels = bound_dense(self.coefficients).flatten(1) * self.weights.unsqueeze(-1)
        rows = max(1, CHUNK // (d * d))
        for part, x in zip(labels.split(rows), self.x.split(rows), strict=True):
            matrix += part.T @ (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(1)
        return self.reduce(matrix).reshape(n, n, d, d).transpose(1, 2).reshape(n * d, n * d)

    def mean_eigenvalue(self) -> Tensor:
        """Gives the trace divided by the size, ()."""
        trace = bound_diagonal(self.coefficients).sum(-1) * self.x.square().sum(-1)
        return self.reduce((self.weights * trace).sum()) / (self.coefficients.beta.shape[-1] * self.x.shape[-1])

    def solve(self, gradient: Tensor, damping: float) -> Tensor:
        """Computes (Sigma + damping I)^{-1} gradient, `[n, d]`.

        Takes a dense Cholesky factorization in float64 if that needs less than 1e9 operations, else conjugate gradients
        to a residual of 1e-6 or 200 iterations, preconditioned by the mean diagonal of B and the second moment of the
        inputs. Raises ValueError if the curvature is not finite.
        """
        size, rows = gradient.numel(), self.reduce(self.x.new_tensor(float(len(self.x)))).item()
        if rows * size**2 + size**3 / 3 <= DENSE:
            factor = cholesky(self._double().dense(len(gradient)), damping)
            return torch.cholesky_solve(gradient.double().reshape(-1, 1), factor).reshape(gradient.shape).to(gradient)
        return self._conjugate_gradients(gradient, damping)

    def _double(self) -> Exact:
        """Converts to float64 from the start: what large inputs lose in float32 is more than the damping."""
        c = self.coefficients
        c = replace(c, beta=c.beta.double(), kappa=c.kappa.double(), rho=c.rho.double())
        return replace(self, x=self.x.double(), weights=self.weights.double(), coefficients=c)

    def _conjugate_gradients(self, gradient: Tensor, damping: float) -> Tensor:
        labels = self.reduce(self.weights @ bound_diagonal(self.coefficients))
        whole = self.reduce(total(self.weights))
        near = Kronecker(labels / whole, self.reduce(second_moment(self.x, self.weights)))
        solution, residual = torch.zeros_like(gradient), gradient.clone()
        if not bool(gradient.any()):
            return solution
        precondition = near.inverse(damping).apply
        direction = precondition(residual)
        product = (residual * direction).sum()
        for _ in range(ITERATIONS):
            image = self.matvec(direction) + damping * direction
            length = product / (direction * image).sum()
            solution += length * direction
            residual -= length * image
            if residual.norm() <= TOLERANCE * gradient.norm():
                break
            preconditioned = precondition(residual)
            product, before = (residual * preconditioned).sum(), product
            direction = preconditioned + product / before * direction
        return solution


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Computes eigenvalues, none below 0, and eigenvectors in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp_min(0), vectors


def cholesky(matrix: Tensor, damping: float) -> Tensor:
    """Factors matrix + damping I in float64, lower `[..., d, d]`, for matrices without negative eigenvalues.

    If rounding gave a matrix eigenvalues below -damping, the size of the rounding is added to the diagonal: a matrix
    above an upper bound is one too. Raises ValueError if the matrix is not finite.
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


def bohning(logits: Tensor | None, x: Tensor, weights: Tensor) -> Kronecker:
    """Gives 1/2 I (x) X'X: above the Hessian of the loss at every weight. Does not depend on the logits."""
    return Kronecker(x.new_tensor(0.5), second_moment(x, weights))


def spectral(logits: Tensor, x: Tensor, weights: Tensor) -> Kronecker:
    """Gives (I - 11'/n) (x) sum_j w_j lmax(B_j) x_j x_j', labels ascending; exact for two labels."""
    _check_labels("spectral", logits)
    top = torch.linalg.eigvalsh(bound_dense(bound_coefficients(logits)))[..., -1].clamp_min(0)
    n = logits.shape[-1]
    centre = torch.eye(n, dtype=x.dtype, device=x.device) - 1 / n
    return Kronecker(centre, second_moment(x, weights * top.to(x)))


def block(logits: Tensor, x: Tensor, weights: Tensor) -> Blocks:
    """Gives sum_j w_j R_j[y] x_j x_j' for label y, with R_j the row sums of |B_j|, labels ascending."""
    _check_labels("block", logits)
    sums = bound_row_sums(bound_coefficients(logits)).to(x) * weights.unsqueeze(-1)
    return Blocks(torch.stack([second_moment(x, column) for column in sums.unbind(-1)]))


def diagonal(logits: Tensor, x: Tensor, weights: Tensor, order: str = "ascending") -> Kronecker:
    """Gives 2 diag(mean_j B_j) (x) X'X; 1.9 in place of 2 was needed on digits, up to 2.8 on clustered inputs."""
    rows = max(1, CHUNK // logits.shape[-1])
    parts = zip(logits.split(rows), weights.split(rows), strict=True)
    labels = torch.stack([part.to(a) @ bound_diagonal(bound_coefficients(a, order)) for a, part in parts]).sum(0)
    return Kronecker(2 * labels.to(x) / total(weights), second_moment(x, weights))


def kfac(logits: Tensor, x: Tensor, weights: Tensor, order: str = "descending") -> Kronecker:
    """Gives mean_j B_j (x) X'X: not a bound; fast on full batches, but it can diverge."""
    _check_labels("kfac", logits)
    rows = max(1, CHUNK // logits.shape[-1] ** 2)
    labels = x.new_zeros(logits.shape[-1], logits.shape[-1])
    for a, part in zip(logits.split(rows), weights.split(rows), strict=True):
        factor = (bound_factor(bound_coefficients(a, order)) * part.sqrt().to(x)[:, None, None]).flatten(0, 1)
        labels += factor.T @ factor
    return Kronecker(labels / total(weights), second_moment(x, weights))


def geometric(logits: Tensor, x: Tensor, weights: Tensor) -> Kronecker:
    """Gives diag(sqrt(v)) (x) X'X, v = mean_j p_j (1 - p_j) with the softmax p_j: a heuristic, not a bound.

    For every label sqrt(v) is the geometric mean of two: 2 v, the mean over rows of Gershgorin's bound on the Hessian
    of log Z where the logits are now, and Bohning's 1/2, which holds for all logits. For a rare label the first is far
    too small as soon as its logit grows, and the second far too large until then. Nothing certifies what is
    between them: a full-batch step of length 1 can increase the loss.
    """
    rows = max(1, CHUNK // logits.shape[-1])
    variance = x.new_zeros(logits.shape[-1])
    for a, part in zip(logits.split(rows), weights.split(rows), strict=True):
        p = a.softmax(-1)
        variance += part.to(p) @ (p * (1 - p))
    return Kronecker(variance / total(weights), second_moment(x, weights), root=True)


CERTIFIED = ("exact", "bohning", "spectral", "block")
MAJORIZERS: dict[str, Callable[..., Kronecker | Blocks]] = {
    "bohning": bohning,
    "spectral": spectral,
    "block": block,
    "diag": diagonal,
    "kfac": kfac,
    "geometric": geometric,
}


def exact(logits: Tensor, x: Tensor, weights: Tensor, order: str, reduce: Reduce = lambda value: value) -> Exact:
    """Makes Sigma = sum_j w_j B_j (x) x_j x_j', labels in an order of `bound_coefficients`."""
    return Exact(x, weights, bound_coefficients(logits, order), reduce)


def majorize(name: str, theta: Tensor, x: Tensor, weights: Tensor, order: str | None = None) -> Kronecker | Blocks:
    """Makes a majorizer or heuristic by name at theta `[n, d]`; an order is for diag and kfac."""
    options = {} if order is None else {"order": order}
    return MAJORIZERS[name](None if name == "bohning" else x @ theta.T, x, weights, **options)


def averaged(curvature: Kronecker | Blocks, total: Tensor, reduce: Reduce) -> Kronecker | Blocks:
    """Averages the curvature of this process, whose weights sum to `total`, over all, by `reduce` in place."""
    if isinstance(curvature, Blocks):
        return Blocks(reduce(curvature.blocks))
    labels, inputs = curvature.labels, reduce(curvature.inputs)
    if labels.ndim:
        # Labels are a mean over rows already, in which processes without rows must not count.
        labels = reduce(labels * total) / reduce(total.clone())
    return replace(curvature, labels=labels, inputs=inputs)
