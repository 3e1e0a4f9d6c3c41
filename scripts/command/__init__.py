"""The command `favor`. It stands beside the package `favor`, so that its help does not import torch."""
