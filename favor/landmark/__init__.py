"""Landmarks: groups of keys that stand for all keys, each by its mean, count and variance."""
