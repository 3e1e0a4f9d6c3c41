"""Fits a pretrained model to linear attention: statistics, parameters, weights, exact heads."""
