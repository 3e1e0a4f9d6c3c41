"""Causal attention that goes on where it stopped: one token or one piece at a time."""
