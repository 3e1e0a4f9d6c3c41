"""Nonnegative matrix factorisation under the Kullback-Leibler divergence, by scale-invariant power iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from scipy import sparse
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data
from torch import Tensor

from favor.decomposition.inputs import check_integer, generator_of, rows_of, same_kind, tensor_of, warn_of_end
from favor.decomposition.mixture import check_options

State = tuple[Tensor, Tensor, Tensor]  # W, H and their product
# Sweeps between two checks of the objective; an odd number shows what swings from sweep to sweep.
CHECK_EVERY = 9
CLIP = 1e-12  # least value of WH in a denominator, relative to the mean of V
_BLOCK = 1 << 18  # entries of temporaries for sparse V, few enough for caches


@dataclass(frozen=True)
class Target:
    """The matrix V `[n, m]` that is factored.

    Attributes:
        values: V, or the entries of a sparse one that are not zero, `[nnz]`, with their rows and columns in `places`
            and a SciPy CSR or CSC array as `pattern`, with the entries in this order.
        column_sums, row_sums: `[m]` and `[n]`.
        least: lower bound at which WH is clipped.
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
    gradient is Q_kj t_j / v_j, Q = W'(V / WH) / c the factor of MU and t the column sums of WH. Afterwards the column
    sums of WH are those of V. WH `[n, K] @ [K, m]` must reach all of V (`Target.reached`), and `product` is that of
    `Target.product`; the shift is relative to the multiplier, None for MU.
    """
    tiny = torch.finfo(H.dtype).tiny
    sums = W.sum(0)
    factor = target.pulled_back(W, product).div_(sums.clamp(min=tiny).unsqueeze(-1))
    if shift is None:
        return factor.mul_(H)
    before = (sums @ H).div_(target.column_sums.clamp(min=target.least))  # clipped like WH, for columns without entries
    H = factor.mul_(before).add_(shift).square_().mul_(H)
    return H.mul_(target.column_sums / (sums @ H).clamp_(min=tiny))


def sweep(target: Target, W: Tensor, H: Tensor, product: Tensor, shift: float | None) -> State:
    """Takes one step of H and then one of W; gives W, H and their product."""
    H = half_step(target, W, H, product, shift)
    W = half_step(target.t(), H.t(), W.t(), target.flipped(target.product(W, H)), shift).t()
    return W, H, target.product(W, H)


@dataclass(eq=False, repr=False)
class KLNMF(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Nonnegative factors X ~ W H that minimise sum X log(X / WH) - X + WH, in about half the sweeps of MU.

    With the columns of W normalised, each column of H is a problem of mixture proportions, and so is each row of W for
    given H. A sweep is one step of scale-invariant power iteration for all columns of H and then one for all rows of W
    (`favor.decomposition.mixture_proportions`), each with one pair of matrix products, as in multiplicative updates
    (MU). After every step the column (or row) sums of WH are those of X.

    Args:
        n_components: number K of components, at most the larger of rows and features, with which V can be met exactly;
            None (default) takes the number of features.
        shift: of the power iteration, relative to its multiplier, default 0.05. 0 is in effect the method of the
            thesis; larger shifts are safer and slower, and 1 is as slow as MU.
        guard: whether to check the objective every 9 sweeps and to repeat sweeps that raised it as sweeps of MU, which
            cannot raise it (default True); the plain iteration is not monotone.
        init: "random" (default), uniform and then one sweep of MU, or "custom": `fit_transform(X, W=W, H=H)`.
        tol: stop when sqrt(2 D), D the divergence, falls in 9 sweeps by no more than this share of its value at the
            start, default 1e-4; scikit-learn checks every 10. W is then iterated alone in this way, so that it equals
            that of `transform`. 0 makes exactly `max_iter` sweeps.
        max_iter: largest number of sweeps, default 200.
        random_state: int, RandomState or None, for the start.

    Attributes:
        components_: H, `[n_components, n_features]`.
        reconstruction_err_: sqrt(2 D), D the divergence of X from WH, as scikit-learn reports it.
        n_iter_: sweeps, those that the guard repeated counted once.

    Raises:
        ValueError: from `fit`, for negative data or parameters out of range. A ConvergenceWarning from `fit` and
            `transform` says that max_iter ended the iteration and tol is above 0.

    Notes:
        X may be a dense array, a SciPy sparse matrix, whose cost depends on its nonzero entries only, or a dense
        tensor, which stays on its device. Different starts end in different local optima, whatever the method. Source:
        C. Kim, "Optimization Methods for Scale Invariant Problems in Machine Learning" (Northwestern, 2020), section
        3.5.1; the shift there is added to a gradient of the size of the data, so that it is 0 in effect.

    Example:
        >>> import numpy as np
        >>> from favor.decomposition import KLNMF
        >>> X = np.random.default_rng(0).poisson(3.0, size=(30, 20))
        >>> model = KLNMF(n_components=4, random_state=0, tol=0, max_iter=50)
        >>> W = model.fit_transform(X)
        >>> bool(np.isclose((W @ model.components_).sum(), X.sum()))
        True
    """

    n_components: int | None = None
    _: KW_ONLY
    shift: float = 0.05
    guard: bool = True
    init: str = "random"
    tol: float = 1e-4
    max_iter: int = 200
    random_state: Any = None

    def fit(self, X: Any, y: Any = None, W: Any = None, H: Any = None) -> KLNMF:
        """Finds both factors and keeps H; the arguments are those of `fit_transform`."""
        self.fit_transform(X, W=W, H=H)
        return self

    @torch.no_grad()
    def fit_transform(self, X: Any, y: Any = None, W: Any = None, H: Any = None) -> Any:
        """Finds both factors of a nonnegative X `[n, n_features]`; gives W `[n, K]`, a tensor if X is one.

        W and H are the start with init="custom", `[n, K]` and `[K, n_features]`; zeros stay zero, and a factor common
        to all of WH changes nothing. y is ignored.
        """
        self._check_parameters()
        V = self._matrix(X, reset=True)
        whole, count = Target.of(V), int(V.shape[1] if self.n_components is None else self.n_components)
        if count > max(V.shape):
            raise ValueError(f"n_components must be at most {max(V.shape)} for X {list(V.shape)}, got {count}.")
        left, right = self._start(whole, (V.shape[0], count), (count, V.shape[1]), W, H)
        target = whole.reached(left, right)
        # The clipping of WH is relative to V; the scale of H makes no difference to the first step.
        right = right * _scale(target, left, right)
        state = left, right, target.product(left, right)
        if self.init == "random":
            state = sweep(target, *state, None)
        state, self.n_iter_, stood_still = self._iterate(
            target, state, lambda state, shift: sweep(target, *state, shift)
        )
        if self.tol > 0:
            state, _, _ = self._iterate(target, state, _steps_of_rows(target))
            self._warn(stood_still)
        self.n_components_ = count
        self.reconstruction_err_ = float(_error(whole, state))
        self.components_ = same_kind(state[1], X)
        return same_kind(state[0], X)

    @torch.no_grad()
    def transform(self, X: Any) -> Any:
        """Gives W `[n, K]` of other rows, for the H of `fit`; features that no component has do not count."""
        check_is_fitted(self)
        self._check_parameters()
        whole = Target.of(self._matrix(X, reset=False))
        H = tensor_of(self.components_, whole.values)
        W = H.new_ones(len(whole.row_sums), H.shape[0])
        target = whole.reached(W, H)
        step = _steps_of_rows(target)
        W = W * _scale(target, W, H)
        # A step of MU first: it settles what components do not share, where the plain iteration swings.
        state, _, stood_still = self._iterate(target, step((W, H, target.product(W, H)), None), step)
        self._warn(stood_still)
        return same_kind(state[0], X)

    @torch.no_grad()
    def inverse_transform(self, X: Any) -> Any:
        """Gives WH `[n, n_features]` for W `[n, K]`."""
        check_is_fitted(self)
        W = X if isinstance(X, Tensor) else tensor_of(check_array(X, dtype=float))
        if W.ndim != 2 or W.shape[1] != self.n_components_:
            raise ValueError(f"X must be [n, {self.n_components_}], one column per component, got {list(W.shape)}.")
        W = W if W.is_floating_point() else W.double()
        return same_kind(W @ tensor_of(self.components_, W), X)

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        return tags

    def _start(
        self, target: Target, left: tuple[int, int], right: tuple[int, int], W: Any, H: Any
    ) -> tuple[Tensor, Tensor]:
        like = target.values
        if self.init == "custom":
            return _given("W", W, left, like), _given("H", H, right, like)
        if W is not None or H is not None:
            raise ValueError('W and H are a start for init="custom"; got them with init="random".')
        generator = generator_of(self.random_state)
        # Numbers above 0, as zeros would stay zero; equal on all devices.
        first, second = (1 - torch.rand(shape, dtype=like.dtype, generator=generator) for shape in (left, right))
        return first.to(like.device), second.to(like.device)

    def _iterate(
        self, target: Target, state: State, step: Callable[[State, float | None], State]
    ) -> tuple[State, int, bool]:
        """Steps until the objective stands still; gives the last state, the steps, and whether it stood still."""

        def several(count: int, shift: float | None) -> tuple[State, Tensor]:
            new = state
            for _ in range(count):
                new = step(new, shift)
            return new, _error(target, new)

        first = previous = _error(target, state)
        slack = 64 * torch.finfo(target.row_sums.dtype).eps * target.row_sums.sum()  # rounding of the divergence
        for number in range(0, self.max_iter, CHECK_EVERY):
            count = min(CHECK_EVERY, self.max_iter - number)
            new, reached = several(count, self.shift)
            if self.guard and not reached.square() <= previous.square() + 2 * slack:
                new, reached = several(count, None)
            change, state, previous = (previous - reached).abs(), new, reached
            if self.tol > 0 and count == CHECK_EVERY and change <= self.tol * first:
                return state, number + count, True
        return state, self.max_iter, False

    def _warn(self, stood_still: bool) -> None:
        if self.tol > 0 and not stood_still:
            warn_of_end(f"max_iter={self.max_iter} sweeps did not meet tol={self.tol}; raise one of them.")

    def _matrix(self, X: Any, *, reset: bool) -> Any:
        """Checks X and gives it as a dense tensor or, if it is sparse, as a SciPy sparse matrix."""
        if isinstance(X, Tensor) and X.layout == torch.strided:
            V = rows_of(self, X, reset=reset)
            if bool((V < 0).any()):
                raise ValueError("Negative values in data passed to KLNMF (input X).")
            return V
        if isinstance(X, Tensor):
            raise TypeError(f"X must be a dense tensor, an array or a SciPy sparse matrix, got a {X.layout} tensor.")
        checked = validate_data(self, X, dtype=float, accept_sparse=("csr", "csc", "coo"), reset=reset)
        check_non_negative(checked, "KLNMF (input X)")
        return checked if sparse.issparse(checked) else tensor_of(checked)

    def _check_parameters(self) -> None:
        check_integer("n_components", self.n_components, None)
        check_options(self.shift, self.guard, self.tol, self.max_iter)
        if not isinstance(self.init, str) or self.init not in ("random", "custom"):
            raise ValueError(f'init must be "random" or "custom", got {self.init!r}.')


def _error(target: Target, state: State) -> Tensor:
    """Gives sqrt(2 D)."""
    return (2 * target.divergence(*state)).clamp(min=0).sqrt()


def _scale(target: Target, W: Tensor, H: Tensor) -> Tensor:
    """Gives the factor that makes the sum of WH equal to that of V."""
    return target.row_sums.sum() / (W.sum(0) @ H.sum(1)).clamp(min=torch.finfo(H.dtype).tiny)


def _steps_of_rows(target: Target) -> Callable[[State, float | None], State]:
    across = target.t()

    def step(state: State, shift: float | None) -> State:
        W, H, product = state
        W = half_step(across, H.t(), W.t(), target.flipped(product), shift).t()
        return W, H, target.product(W, H)

    return step


def _given(name: str, given: Any, shape: tuple[int, int], like: Tensor) -> Tensor:
    if given is None:
        raise ValueError(f'init="custom" needs {name}, of shape {list(shape)}: fit_transform(X, W=W, H=H).')
    factor = tensor_of(given, like)
    if factor.shape != shape or not bool((factor.isfinite() & (factor >= 0)).all()):
        raise ValueError(f"{name} must be {list(shape)}, finite and nonnegative, got {list(factor.shape)}.")
    return factor
