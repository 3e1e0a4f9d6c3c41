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
from favor.optim.combined import CombinedOptimizer
from favor.optim.full_batch import BBM
from favor.optim.low_rank import LSPFB, LowRankBound, LowRankCurvature, low_rank_bound
from favor.optim.single import ProxBoundSGD, exact_step_
from favor.optim.softmax_bound import SoftmaxBound
from favor.optim.solve import bound_solve
from favor.optim.stochastic import SBM, SPFB

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
