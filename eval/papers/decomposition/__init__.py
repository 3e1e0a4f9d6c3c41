"""The decompositions compared with those of scikit-learn: `python -m favor.eval.papers.decomposition`."""
