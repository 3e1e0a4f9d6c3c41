"""Log-mel features of the Conformer: 100 frames a second, normalised over the frames of an utterance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature, LasrFeatureExtractor

from favor.models.speech.audio import check_call, check_sizes, waveforms

NORMALIZE = ("utterance", "none")
BLOCK_FRAMES = 256  # frames whose spectra exist at once: about 4 MB, whether the audio lasts a second or an hour
VARIANCE_FLOOR = 1e-5
# For measured constants. The standard deviation of bins of speech is 2 to 4. A bin below this floor was empty in the
# measured audio; other audio must not be amplified there more than tenfold.
STD_FLOOR = 0.1
TOP_HERTZ = 7500


class ConformerFeatureExtractor(LasrFeatureExtractor):
    """Turns waveforms into log-mel features `[B, T, F]`, right padded with 0, and their `attention_mask [B, T]`.

    Windows, Fourier transform and mel filters (HTK scale, 125 to 7500 Hz) are those of transformers' LASR. Unlike in
    LASR, features of an utterance are computed before it is padded, so that its frames do not depend on the batch, and
    frames are computed in blocks, so that memory apart from the features themselves does not grow with the audio.

    Args:
        feature_size: mel bins F. Default 80. With 128 the first filter falls between two points of a transform of 512
            and its bin is constant, as in LASR.
        sampling_rate: Hz, at least 15000 for the filters to exist. Default 16000.
        hop_length: samples between frames. Default 160, 10 ms at 16 kHz.
        win_length: samples of a window. Default 400, 25 ms at 16 kHz.
        n_fft: points of the Fourier transform, at least win_length. Default 512.
        padding_value: of padded frames. Default 0, the mean after normalisation.
        normalize: "utterance" (default) subtracts the mean of each bin over the utterance's own frames and divides by
            its standard deviation; "none" subtracts `mean` and divides by `std`, which are constants, as streaming
            needs.
        mean: F constants for "none". Default None: zeros.
        std: F positive constants for "none". Default None: ones.

    Raises:
        ValueError: for a setting out of range; the message names it.
        TypeError: for a size that is no whole number.

    Example:
        >>> import numpy as np
        >>> from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
        >>> extractor = ConformerFeatureExtractor()
        >>> extractor(np.random.default_rng(0).normal(size=16000), sampling_rate=16000).input_features.shape
        torch.Size([1, 98, 80])
    """

    def __init__(
        self,
        feature_size: int = 80,
        sampling_rate: int = 16000,
        hop_length: int = 160,
        n_fft: int = 512,
        win_length: int = 400,
        padding_value: float = 0.0,
        normalize: str = "utterance",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        if normalize not in NORMALIZE:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZE)}, got {normalize!r}.")
        check_sizes(feature_size, sampling_rate, hop_length, n_fft, win_length=win_length)
        if win_length > n_fft:
            raise ValueError(f"n_fft must be at least win_length, got {n_fft} and {win_length}.")
        if sampling_rate < 2 * TOP_HERTZ:
            raise ValueError(
                f"sampling_rate must be at least {2 * TOP_HERTZ}, got {sampling_rate}: resample the audio."
            )
        super().__init__(feature_size, sampling_rate, hop_length, n_fft, win_length, padding_value, **kwargs)
        self.normalize = normalize
        self.mean = [0.0] * feature_size if mean is None else [float(value) for value in mean]
        self.std = [1.0] * feature_size if std is None else [float(value) for value in std]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != feature_size or not np.isfinite(values).all():
                raise ValueError(
                    f"{name} must be {feature_size} finite numbers, one per bin, got {len(values)}: {values}."
                )
        wrong = [bin for bin, value in enumerate(self.std) if value <= 0]
        if wrong:
            raise ValueError(
                f"std must be positive for each bin, got {self.std[wrong[0]]} for bin {wrong[0]} of {feature_size} "
                f"({len(wrong)} such bins): a bin without energy in the audio. Give it at least {STD_FLOOR}, as "
                "ConformerFeatureExtractor.measured does."
            )

    @classmethod
    def measured(cls, waveforms: Iterable[Any], **settings: Any) -> ConformerFeatureExtractor:
        """Makes an extractor with fixed constants: mean and standard deviation of each bin over all frames.

        Deviations are at least 0.1: audio whose band ends early (MP3, telephones) leaves bins constant.

        Args:
            waveforms: float samples `[n]` in [-1, 1] each.
            **settings: of the class, without `normalize`, `mean` and `std`.
        """
        extractor = cls(**settings)
        frames = torch.cat([extractor.log_mel(waveform) for waveform in waveforms]).double()
        std = frames.std(0).clamp(min=STD_FLOOR)
        return cls(normalize="none", mean=frames.mean(0).tolist(), std=std.tolist(), **settings)

    def num_frames(self, samples: int) -> int:
        """Counts the frames of a waveform of `samples` samples: windows that lie inside it."""
        return max(0, (samples - self.win_length) // self.hop_length + 1)

    def log_mel(self, waveform: Tensor, device: str | torch.device = "cpu") -> Tensor:
        """Computes logarithms of the mel energies, not normalised: log max(1e-5, energy).

        A stream gives equal frames if each piece begins with the samples that the piece before left over: those from
        `num_frames(n) * hop_length` on (win_length - hop_length samples, and those that filled no hop).

        Args:
            waveform: float samples `[n]` in [-1, 1].
            device: where to compute. Default "cpu".

        Returns:
            `[num_frames(n), F]`, float32, on the device; no frames if n < win_length.
        """
        waveform = torch.as_tensor(waveform).to(device)
        total = self.num_frames(len(waveform))
        features = torch.empty(total, self.feature_size, device=device)
        for first in range(0, total, BLOCK_FRAMES):
            last = min(first + BLOCK_FRAMES, total)
            piece = waveform[first * self.hop_length : (last - 1) * self.hop_length + self.win_length]
            features[first:last] = self._torch_extract_fbank_features(piece, device)
        return features

    def scale(self, features: Tensor, normalize: str | None = None) -> Tensor:
        """Normalises the frames of one utterance.

        Args:
            features: `[T, F]`, real frames only.
            normalize: "utterance" or "none", see the class. Default None: that of the extractor.

        Returns:
            `[T, F]`; for "utterance", (x - mean) / sqrt(variance + 1e-5), so that a constant bin is 0.
        """
        if (normalize or self.normalize) == "utterance":
            variance, mean = torch.var_mean(features.double(), dim=0, correction=0)
            return (features - mean.to(features.dtype)) / (variance + VARIANCE_FLOOR).sqrt().to(features.dtype)
        return (features - features.new_tensor(self.mean)) / features.new_tensor(self.std)

    def __call__(  # type: ignore[override]
        self,
        raw_speech: Any,
        truncation: bool = False,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        padding: bool | str = "longest",
        max_length: int | None = None,
        sampling_rate: int | None = None,
        do_normalize: bool | None = None,
        device: str | torch.device = "cpu",
        dither: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> BatchFeature:
        """Computes features of one waveform or of several.

        Args:
            raw_speech: float samples in [-1, 1] of one mono waveform, `[n]`, or several, `[B, n]` or a list of `[n]`:
                arrays, tensors or lists.
            truncation, pad_to_multiple_of, return_tensors, padding, max_length: of frames, as in transformers.
            return_attention_mask: the mask is always returned; False is an error.
            sampling_rate: that of the extractor. Default None: taken to be that, with a warning.
            do_normalize: False takes "none" and True "utterance" for this call. Default None: as the extractor is set.
            device: where to compute. Default "cpu".
            dither: standard deviation of Gaussian noise added to the samples, for training only. Default 0.
            generator: of that noise, on the CPU. Default None: torch's.

        Returns:
            `input_features [B, T, F]` float32 and `attention_mask [B, T]` bool, on the CPU.

        Raises:
            ValueError: for another sampling rate, a waveform shorter than a window, samples that are not finite, or
                another shape.
            TypeError: for samples that are not floats.
        """
        check_call(sampling_rate, self.sampling_rate, return_attention_mask)
        normalize = None if do_normalize is None else NORMALIZE[0 if do_normalize else 1]
        given = waveforms(raw_speech, self.win_length, dither, generator)
        frames = [self.scale(self.log_mel(one, device), normalize).cpu() for one in given]
        padded = self.pad(
            BatchFeature({"input_features": frames}),
            padding=padding,
            max_length=max_length,
            truncation=truncation,
            pad_to_multiple_of=pad_to_multiple_of,
            return_attention_mask=True,
            return_tensors=return_tensors,
        )
        mask = padded["attention_mask"]
        padded["attention_mask"] = mask.bool() if isinstance(mask, Tensor) else np.asarray(mask, dtype=bool)
        return padded
