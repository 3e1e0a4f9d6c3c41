"""GLUE, tasks x backends x seeds: `python -m favor.eval.glue`."""
