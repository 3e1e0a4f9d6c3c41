"""CTC on the encoder of a Whisper in the speech programs."""

from __future__ import annotations

import torch
from transformers import WhisperForConditionalGeneration

from favor.models.whisper_ctc import WhisperForCTC
from favor.train.speech.arguments import Arguments
from favor_command.saved import load_model


def make_whisper_ctc(arguments: Arguments, vocab_size: int, new_head: bool) -> WhisperForCTC:
    """Puts a new CTC head on the encoder of a Whisper, or loads a saved model of this kind.

    Args:
        arguments: all arguments of the program.
        vocab_size: tokens of a new head, the blank included.
        new_head: whether the checkpoint is a Whisper.
    """
    given = arguments.model
    path, backend = str(given.model_name_or_path), given.attn_implementation
    if not new_head:
        chosen = {} if backend is None else {"attn_implementation": backend}
        return load_model(WhisperForCTC, path, dtype=torch.float32, **chosen)
    exact = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    whisper = load_model(WhisperForConditionalGeneration, path, **exact)
    # The head alone: Whisper was trained without dropout, and its outputs change a lot with it.
    return WhisperForCTC.from_whisper(whisper, vocab_size, attn_implementation=backend, head_dropout=given.dropout)
