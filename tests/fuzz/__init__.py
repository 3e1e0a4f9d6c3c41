"""Draws calls at random and checks what has to hold for every one of them.

    python -m tests.fuzz --calls 100000
    python -m tests.fuzz --what generation --calls 1000

`attention` and `generation` say what a call is, `invariants` what has to hold, and `simplify` finds the simplest call
that fails. `test_fuzz.py` runs a few of them in every run of the tests.
"""
