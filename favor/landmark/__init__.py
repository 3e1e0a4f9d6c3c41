"""Landmarks: few keys are exact, and means with counts stand for all others. Nothing about them is random.

attention      the family, and where a call enters
bidirectional  encoders and cross attention: alike keys in nodes, alike queries in blocks
sorting        the order in which neighbours are alike
causal         decoders: prefill, training, pieces and single tokens
kept           the state that a cache of a decoder holds
naive          both from their definition, the truth for tests
"""

from favor.landmark.attention import Landmarks

__all__ = ["Landmarks"]
