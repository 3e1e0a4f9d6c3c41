"""Options of the evaluation programs, one module per program. They do not import torch, so that --help is fast."""
