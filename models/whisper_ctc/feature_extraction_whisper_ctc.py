"""Log-mel features of Whisper for audio of any length, without padding to 30 seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, WhisperFeatureExtractor

from favor.models.speech.audio import check_call, check_sizes, waveforms


class WhisperCTCFeatureExtractor(WhisperFeatureExtractor):
    """Turns waveforms into Whisper's features `[B, T, F]`, right padded with 0, and their `attention_mask [B, T]`.

    The features are those of transformers' `WhisperFeatureExtractor`, which takes the same arguments, but of each
    waveform alone and as long as it is, so that they do not depend on the batch.

    Raises:
        ValueError: for a size out of range. TypeError: for one that is no whole number.

    Example:
        >>> import numpy as np
        >>> from favor.models.whisper_ctc import WhisperCTCFeatureExtractor
        >>> WhisperCTCFeatureExtractor()(np.zeros(16000, np.float32), sampling_rate=16000).input_features.shape
        torch.Size([1, 100, 80])
    """

    def __init__(
        self,
        feature_size: int = 80,
        sampling_rate: int = 16000,
        hop_length: int = 160,
        chunk_length: int = 30,
        n_fft: int = 400,
        **kwargs: Any,
    ) -> None:
        check_sizes(feature_size, sampling_rate, hop_length, n_fft, chunk_length=chunk_length)
        super().__init__(feature_size, sampling_rate, hop_length, chunk_length, n_fft, **kwargs)

    def num_frames(self, samples: int) -> int:
        """Counts the feature frames of a waveform of `samples` samples."""
        # Reflection at the ends needs more samples than half a window.
        return samples // self.hop_length if samples > self.n_fft // 2 else 0

    def __call__(  # type: ignore[override]
        self,
        raw_speech: Any,
        sampling_rate: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        device: str | torch.device = "cpu",
        dither: float = 0.0,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Computes features of one waveform or of several.

        Args:
            raw_speech: float samples in [-1, 1] of one mono waveform, `[n]`, or several, `[B, n]` or a list of `[n]`.
            sampling_rate: that of the extractor. Default None: taken to be that, with a warning.
            return_tensors: "pt" or "np". Default None: as "pt".
            return_attention_mask: the mask is always returned; False is an error.
            device: where to compute. Default "cpu".
            dither: standard deviation of Gaussian noise added to the samples, for training only. Default 0.
            generator: of that noise, on the CPU. Default None: torch's.
            **kwargs: refused.

        Returns:
            `input_features [B, T, F]` float32 and `attention_mask [B, T]` bool; T is the number of samples over
            `hop_length`, rounded down.

        Raises:
            ValueError: for another sampling rate, an option that has no effect here, a waveform shorter than half a
                window, samples that are not finite, or another shape.
            TypeError: for samples that are not floats.
        """
        check_call(sampling_rate, self.sampling_rate, return_attention_mask)
        if kwargs:
            raise ValueError(f"{', '.join(kwargs)}: features are as long as the audio, leave it out.")
        frames = []
        for waveform in waveforms(raw_speech, self.n_fft // 2 + 1, dither, generator):
            whole = super().__call__(
                waveform.numpy(),
                truncation=False,
                padding="do_not_pad",
                return_tensors="np",
                sampling_rate=self.sampling_rate,
                device=str(device),
            )
            frames.append(torch.from_numpy(np.asarray(whole["input_features"][0])).T.contiguous())
        lengths = torch.tensor([len(one) for one in frames])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        found = {"input_features": pad_sequence(frames, True), "attention_mask": mask}
        return BatchFeature(found, tensor_type=return_tensors)
