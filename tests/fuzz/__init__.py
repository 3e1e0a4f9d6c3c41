"""Draws calls at random, and checks the conditions that every call must satisfy."""
