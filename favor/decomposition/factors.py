"""One half of a sweep of KL-NMF: all columns of one factor, for the other one given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy import sparse
from torch import Tensor

CLIP = 1e-12  # least value of WH in a denominator, relative to the mean of V
_BLOCK = 1 << 18  # entries of temporaries for sparse V, few enough for caches


@dataclass(frozen=True)
class Target:
    """The matrix V that is factored.

    Attributes:
        values: V `[n, m]`; of a sparse one the entries that are not zero, `[nnz]`.
        column_sums: `[m]`.
        row_sums: `[n]`.
        least: lower bound at which WH is clipped.
        pattern: None, or for sparse V a SciPy CSR or CSC array with the entries in the order of `values`.
        places: rows and columns of the entries of sparse V, both `[nnz]`.
    """

    values: Tensor
    column_sums: Tensor
    row_sums: Tensor
    least: float
    pattern: Any = None
    places: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, matrix: Any) -> Target:
        """Takes a nonnegative matrix: a dense tensor, or a SciPy sparse matrix, which costs its nonzero entries."""
        pattern, places, values = None, tuple[Tensor, ...](), matrix
        if sparse.issparse(matrix):
            # SciPy multiplies: CSR tensors of torch warn that they are in beta, and COO tensors take longer.
            pattern = sparse.csr_array(matrix, copy=True)
            pattern.sum_duplicates()
            pattern.eliminate_zeros()
            coo = pattern.tocoo()
            places = tuple(torch.tensor(index, dtype=torch.int64, device="cpu") for index in (coo.row, coo.col))
            values = torch.tensor(pattern.data, dtype=torch.float64, device="cpu")
        rows, columns = matrix.shape
        return cls(values, *_sums(values, places, rows, columns), pattern, places)

    def reached(self, W: Tensor, H: Tensor) -> Target:
        """Gives V without what WH cannot reach because of zeros in W and H; that part does not count in steps."""
        zero = torch.zeros_like(self.values)
        product = replace(self, values=zero, least=0.0).product((W > 0).to(W), (H > 0).to(H))
        if bool(((product > 0) | (self.values == 0)).all()):
            return self
        values = torch.where(product > 0, self.values, zero)
        sums = _sums(values, self.places, len(self.row_sums), len(self.column_sums))
        return Target(values, *sums, self.pattern, self.places)

    def t(self) -> Target:
        """Gives V', for the other half of a sweep; the entries of a sparse one keep their order."""
        sums = self.row_sums, self.column_sums
        if self.pattern is None:
            return Target(self.values.t(), *sums, self.least)
        return Target(self.values, *sums, self.least, self.pattern.T, self.places[::-1])

    def flipped(self, product: Tensor) -> Tensor:
        """Turns a product of the shape of V, or of its entries, into one of V'."""
        return product.t() if self.pattern is None else product

    def product(self, W: Tensor, H: Tensor) -> Tensor:
        """Gives WH, clipped, where V has entries: `[n, m]`, or `[nnz]` for a sparse V."""
        if self.pattern is None:
            return (W @ H).clamp_(min=self.least)
        W, columns = W.contiguous(), H.t().contiguous()
        blocks = zip(*(index.split(max(1, _BLOCK // W.shape[1])) for index in self.places), strict=True)
        parts = [W.index_select(0, i).mul_(columns.index_select(0, j)).sum(-1) for i, j in blocks]
        return torch.cat(parts).clamp_(min=self.least) if parts else W.new_zeros(0)

    def pulled_back(self, W: Tensor, product: Tensor) -> Tensor:
        """Gives W' (V / WH), `[K, m]`, given the product."""
        ratio = self.values / product
        if self.pattern is None:
            return W.t() @ ratio
        pattern = type(self.pattern)(
            (ratio.numpy(), self.pattern.indices, self.pattern.indptr), shape=self.pattern.shape
        )
        return torch.from_numpy(pattern.T @ W.contiguous().numpy()).t()

    def divergence(self, W: Tensor, H: Tensor, product: Tensor) -> Tensor:
        """Gives the generalised Kullback-Leibler divergence of V from WH, given the product."""
        logs = (self.values / product).clamp_(min=torch.finfo(product.dtype).tiny).log_()
        return (self.values * logs).sum() - self.row_sums.sum() + W.sum(0) @ H.sum(1)


def _sums(values: Tensor, places: tuple[Tensor, ...], rows: int, columns: int) -> tuple[Tensor, Tensor, float]:
    """Gives the sums of columns and of rows, and the bound at which WH is clipped."""
    if places:
        by_column = values.new_zeros(columns).index_add_(0, places[1], values)
        by_row = values.new_zeros(rows).index_add_(0, places[0], values)
    else:
        by_column, by_row = values.sum(0), values.sum(1)
    mean = float(by_row.sum()) / (rows * columns)
    return by_column, by_row, max(CLIP * mean, torch.finfo(values.dtype).tiny)


def half_step(target: Target, W: Tensor, H: Tensor, product: Tensor, shift: float | None) -> Tensor:
    """Gives H after one step of scale-invariant power iteration in every column, or of MU.

    With c_k the column sums of W and v_j those of V, X_kj = H_kj c_k / v_j are mixture proportions. Their normalised
    gradient is Q_kj t_j / v_j, Q = W'(V / WH) / c the factor of MU and t the column sums of WH.

    Args:
        target: V, of which WH reaches everything (`Target.reached`).
        W: `[n, K]`.
        H: `[K, m]`.
        product: WH, from `Target.product`.
        shift: relative to the multiplier; None for MU.

    Returns:
        H, `[K, m]`; the column sums of WH are then those of V.
    """
    tiny = torch.finfo(H.dtype).tiny
    sums = W.sum(0)
    factor = target.pulled_back(W, product).div_(sums.clamp(min=tiny).unsqueeze(-1))
    if shift is None:
        return factor.mul_(H)
    # Clipped like WH, for columns without entries.
    before = (sums @ H).div_(target.column_sums.clamp(min=target.least))
    H = factor.mul_(before).add_(shift).square_().mul_(H)
    return H.mul_(target.column_sums / (sums @ H).clamp_(min=tiny))


def sweep(target: Target, W: Tensor, H: Tensor, product: Tensor, shift: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Takes one step of H and then one of W.

    Returns:
        W, H and their product.
    """
    H = half_step(target, W, H, product, shift)
    W = half_step(target.t(), H.t(), W.t(), target.flipped(target.product(W, H)), shift).t()
    return W, H, target.product(W, H)
