"""Draws calls at random and checks the conditions that every call must satisfy.

    python -m tests.fuzz --calls 100000
    python -m tests.fuzz --what generation --calls 1000

`attention` and `generation` define calls, `invariants` has the conditions, and `simplify` finds the simplest call that
fails. `test_fuzz.py` checks a few calls in every run of the tests.
"""
