"""A report on linear attention with your model and text, to read in a browser: `python -m favor.eval.report`."""
