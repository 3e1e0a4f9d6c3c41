"""Optimizers of a softmax output layer inside a network: `python -m favor.eval.papers.head_optimizer`."""
