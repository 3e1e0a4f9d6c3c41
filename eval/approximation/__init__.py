"""Distance from exact attention on a pretrained model: `python -m favor.eval.approximation`."""
