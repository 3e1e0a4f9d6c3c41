"""Landmarks: few keys are exact, and means with counts stand for all others. Nothing about them is random."""

from favor.landmark.attention import Landmarks

__all__ = ["Landmarks"]
