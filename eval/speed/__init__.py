"""Speed and memory of attention: `python -m favor.eval.speed`."""
