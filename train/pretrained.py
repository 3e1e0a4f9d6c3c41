"""Pretrained models as their checkpoints name them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel

from favor.models import bert


def load_exact(path: str, *, performer: bool = False) -> PreTrainedModel:
    """A model of the class its checkpoint names, in float32 and with exact attention.

    Args:
        path: folder or hub name; transformers' own models and those of the zoo.
        performer: load a BERT as Performer BERT, whose saved folder remembers its backend.

    Raises:
        ValueError: if there is no such class, or no Performer BERT with the head of the checkpoint.
    """
    config = AutoConfig.from_pretrained(path)
    name = (config.architectures or [None])[0]
    model_class: Any = AutoModel
    if name is not None:
        wanted = f"Performer{name}" if performer and config.model_type == "bert" else name
        model_class = getattr(transformers, wanted, None) or getattr(bert, wanted, None)
        if model_class is None:
            raise ValueError(f"{path} holds a {name}, and there is no class {wanted} to load it with")
    return model_class.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
