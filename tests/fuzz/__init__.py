"""Draws calls at random, and checks the conditions that every call must satisfy.

`attention` and `generation` define calls, and `invariants` has the conditions. `test_fuzz.py` checks a few calls in
every run of the tests, and more if the environment says how many: FUZZ_CALLS=100000.
"""
