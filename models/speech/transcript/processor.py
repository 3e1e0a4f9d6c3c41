"""Turns audio and transcripts into inputs of the Conformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, LasrProcessor

from favor.models.speech.encoder import IGNORED


class ConformerProcessor(LasrProcessor):
    """A `ConformerFeatureExtractor` and a `ConformerTokenizer` behind one call.

    Args:
        feature_extractor: makes `input_features` and `attention_mask` of audio.
        tokenizer: makes `labels` of text, and text of ids: `decode` and `batch_decode` are its methods.

    Example:
        >>> import numpy as np
        >>> from favor.models.conformer import ConformerFeatureExtractor
        >>> from favor.models.speech import ConformerProcessor, train_tokenizer
        >>> tokenizer = train_tokenizer(["good morning", "good evening"], "char")
        >>> processor = ConformerProcessor(ConformerFeatureExtractor(), tokenizer)
        >>> sorted(processor(audio=np.zeros(16000, dtype=np.float32), sampling_rate=16000, text="good"))
        ['attention_mask', 'input_features', 'labels']
    """

    def __call__(  # type: ignore[override]
        self,
        audio: Any = None,
        text: str | list[str] | None = None,
        sampling_rate: int | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Makes model inputs of audio, of transcripts, or of both.

        Args:
            audio: one waveform or several, see `ConformerFeatureExtractor`. Default None.
            text: one transcript or several, taken unchanged; see `normalize_transcript`. Default None.
            sampling_rate: of the audio. Default None: that of the extractor, with a warning.
            **kwargs: for the feature extractor.

        Returns:
            With audio, `input_features [B, T, F]` and `attention_mask [B, T]`; with text, `labels [B, U]` padded with
            -100.

        Raises:
            ValueError: without audio and text, for different numbers of transcripts and waveforms, or from the
                extractor.
        """
        if audio is None and text is None:
            raise ValueError("audio or text must be given, got neither.")
        outputs = BatchFeature()
        if audio is not None:
            outputs.update(self.feature_extractor(audio, sampling_rate=sampling_rate, **kwargs))
        if text is not None:
            outputs["labels"] = self.labels(text)
        if audio is not None and text is not None and len(outputs["labels"]) != len(outputs["input_features"]):
            raise ValueError(
                f"text must hold one transcript per waveform, got {len(outputs['labels'])} for "
                f"{len(outputs['input_features'])}."
            )
        return outputs

    def labels(self, text: str | list[str]) -> Tensor:
        """Gives the token ids of transcripts `[B, U]`, padded with -100."""
        ids = self.tokenizer([text] if isinstance(text, str) else list(text))["input_ids"]
        return pad_sequence([torch.tensor(row, dtype=torch.long) for row in ids], True, IGNORED)
