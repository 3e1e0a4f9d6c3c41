"""The decompositions compared with what scikit-learn has: `python -m favor.eval.decomposition`."""
