"""Bound majorization: optimizers for a softmax output layer that use the partition function's own curvature."""

from favor.optim.bound import (
    BoundCoefficients,
    PartitionBound,
    bound_coefficients,
    bound_dense,
    bound_diagonal,
    bound_factor,
    bound_matvec,
    bound_row_sums,
    partition_bound,
)
from favor.optim.logistic import BBM, SBM, SPFB
from favor.optim.low_rank import LSPFB, LowRankBound, LowRankCurvature, low_rank_bound
from favor.optim.single import ProxBoundSGD, bound_solve, exact_step_
from favor.optim.softmax_bound import CombinedOptimizer, SoftmaxBound

__all__ = [
    "BBM",
    "LSPFB",
    "SBM",
    "SPFB",
    "BoundCoefficients",
    "CombinedOptimizer",
    "LowRankBound",
    "LowRankCurvature",
    "PartitionBound",
    "ProxBoundSGD",
    "SoftmaxBound",
    "bound_coefficients",
    "bound_dense",
    "bound_diagonal",
    "bound_factor",
    "bound_matvec",
    "bound_row_sums",
    "bound_solve",
    "exact_step_",
    "low_rank_bound",
    "partition_bound",
]
