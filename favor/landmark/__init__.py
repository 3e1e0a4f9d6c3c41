"""Landmarks: groups of keys that stand for all keys, each by its mean and count. Nothing about them is random."""

from favor.landmark.grouping import Landmarks

__all__ = ["Landmarks"]
