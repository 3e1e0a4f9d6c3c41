"""Bound majorization compared with other optimizers: `python -m favor.eval.papers.majorization`."""
