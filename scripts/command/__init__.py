"""The command `favor`. It is not inside the package `favor`, so that its help does not import torch."""
