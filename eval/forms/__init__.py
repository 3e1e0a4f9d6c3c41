"""Compares forms of landmark attention before one is built."""
