"""Landmarks: exact attention to the keys that matter to a block of queries, and means of all others."""

from favor.landmark import far  # noqa: F401  adds landmarks of far keys
from favor.landmark.attention import Landmarks

__all__ = ["Landmarks"]
