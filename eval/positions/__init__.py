"""Evaluation of relative positions with landmarks."""
