"""Which models of transformers run with a FAVOR backend: the table of `python -m favor.eval.compatibility`."""
