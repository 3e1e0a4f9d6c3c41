"""Command-line arguments of noise, reverberation and volume in a speech training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from favor.train.common.arguments import option

# Seconds; in a shorter response the noise could be greater than the direct path.
LEAST_RT60 = 0.05
# How the command line takes a range.
_RANGE = {"nargs": 2, "metavar": ("LOW", "HIGH")}


@dataclass(kw_only=True)
class AcousticArguments:
    """Noise, reverberation and volume of the audio in training."""

    noise_dir: str | None = option(None, "Folder of audio files with noise, pieces of which are added. Default: none.")
    noise_snr: list[float] | None = field(
        default=None,
        metadata={**_RANGE, "help": "Range of signal-to-noise ratios in dB, of mean powers. Default: 5 20."},
    )
    noise_probability: float | None = option(None, "Probability that an utterance gets noise. Default: 0.5.")
    reverb_dir: str | None = option(
        None, "Folder of audio files with impulse responses of rooms, which reverberate the audio. Default: none."
    )
    reverb_rt60: list[float] | None = field(
        default=None,
        metadata={
            **_RANGE,
            "help": "Range of reverberation times in seconds, of responses made of decaying noise. Default: none.",
        },
    )
    reverb_probability: float | None = option(None, "Probability that an utterance is reverberated. Default: 0.5.")
    gain: list[float] | None = field(
        default=None,
        metadata={
            **_RANGE,
            "help": "Range in dB by which the volume changes; it matters little with normalize utterance.",
        },
    )

    def __post_init__(self) -> None:
        """Checks the values; raises ValueError for one that cannot be used or has no effect."""
        for name in ("noise_snr", "reverb_rt60", "gain"):
            values = getattr(self, name)
            if values is not None and not (len(values) == 2 and -math.inf < values[0] <= values[1] < math.inf):
                raise ValueError(f"{name} must be two numbers, the least and the greatest, got {values}")
        if self.reverb_rt60 is not None and self.reverb_rt60[0] < LEAST_RT60:
            raise ValueError(f"reverb_rt60 must be at least {LEAST_RT60} seconds, got {self.reverb_rt60}")
        if self.reverb_dir is not None and self.reverb_rt60 is not None:
            raise ValueError("reverb_dir and reverb_rt60 both give impulse responses: give one of them")
        is_dry = self.reverb_dir is None and self.reverb_rt60 is None
        for name, is_off, needed in (
            ("noise_snr", self.noise_dir is None, "noise_dir"),
            ("noise_probability", self.noise_dir is None, "noise_dir"),
            ("reverb_probability", is_dry, "reverb_dir or reverb_rt60"),
        ):
            value = getattr(self, name)
            if value is not None and is_off:
                raise ValueError(f"{name} has no effect without {needed}: add it, or leave {name} out")
            if name.endswith("probability") and value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
