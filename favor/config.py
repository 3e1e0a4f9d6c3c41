"""`FavorConfig`: every option a user turns, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from favor.kernels import KERNELS

# Keys per feature from which on both passes take less time than the fastest exact attention, (bidirectional, causal),
# head_dim 64: on a CPU in float32 (eval/results/speed_cpu*.md), on an H200 in bfloat16 with 64 heads (speed_gpu_*.md).
CROSSOVER = {"cpu": (4, 12), "cuda": (18, 32)}
# The same for landmarks (speed_landmark_*cpu.md, speed_gpu_*.md), causal ones on a CPU with a window (19 without).
# On a GPU causal ones, timed by hand, are slower than exact attention at 65,536 keys: the last number is a bound.
LANDMARK_CROSSOVER = {"cpu": (4, 28), "cuda": (48, 1024)}
# How many times as many a window takes in bidirectional layers (the same files, window 128).
WINDOWED = {"cpu": 2, "cuda": 3}
STATISTICS = ("batch", "calibrated", "corrected")
FACTORIZATIONS: dict[str, tuple[str, ...]] = {
    "wderf": ("eigh", "cholesky"),
    "cderf": ("eigh", "cholesky"),
    "sderf": ("eigh", "newton_schulz", "cholesky"),
    "saderf": ("eigh",),
    "aderf": ("eigh", "newton_schulz"),
    "landmark": ("eigh",),
}
SHARP_FEATURES = tuple(FACTORIZATIONS)


@dataclass(frozen=True)
class FavorConfig:
    """Options of the FAVOR backends; a model carries them as the plain dictionary `config.favor`.

    Args:
        num_features: number of random features (or landmarks) M a head, default 256. `favor_elu` always has head_dim
            features, and `favor_trig` needs an even number.
        features: family behind the `favor#` backend: "wderf" (default: closest to softmax on pretrained models, see
            `favor.eval.approximation`), "cderf", or the FAVOR# paper's own "sderf", "saderf" and "aderf"; or
            "landmark", which is nothing random: M groups of keys stand for all keys (see `favor.features.Landmarks`),
            without parameters, in decoders too. Other backends have one family each and do not read it.
        factorization: how the families of favor# factor their matrices: "eigh" (the optimum); "newton_schulz" for
            "sderf" and "aderf" (the same by matrix products alone); "cholesky" for "wderf", "cderf" and "sderf" (no
            eigendecomposition; within 0.0071 of the optimal objective per direction). "auto" (default) is "eigh" on
            a CPU and, since GPUs decompose the matrices of a batch one by one, the first of the others elsewhere.
        window: tokens are cut into blocks of this many, and attention inside a block is exact, under one normaliser
            with the estimate of the rest. 0 (default) is the papers' method; 64 to 256 is far closer to softmax. Cross
            attention has no such blocks and does without.
        orthogonal: orthogonal directions (default) or independent ones.
        seed: seed of the directions, default 0. Each layer has its own.
        redraw_interval: in training, draw new directions every so many forward passes of a layer; 0 (default) never.
            Evaluation always uses the same ones.
        statistics: where data-dependent parameters come from. "batch" (default) takes them from each sequence; causal
            layers and the cross attention of decoders then fall back to those of FAVOR+, since statistics of a sequence
            show its tokens the future (see `favor.favor_attention`). "calibrated" takes those that `favor.calibrate`
            stored in the model, for causal layers too. "corrected" takes those of each sequence and changes them by
            what `favor.train.distill` learned for each head; not for causal layers.
        exact_below: layers with fewer keys than this run exact softmax attention, which is then faster and has no
            error. "auto" (default) is the length where the two take equally long, measured by `favor.eval.speed` for
            each kind of device: see `exact_threshold`. 0 never runs exact attention.
        kernel: "auto" (default) computes with Triton on CUDA and in blocks of plain torch elsewhere; "torch" and
            "triton" force one of them, see `favor.kernels.available()`.

    Raises:
        ValueError, TypeError: naming the option, what was expected and what came.
    """

    num_features: int = 256
    features: str | None = None
    factorization: str = "auto"
    orthogonal: bool = True
    seed: int = 0
    redraw_interval: int = 0
    window: int = 0
    statistics: str = "batch"
    exact_below: int | str = "auto"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        self._check_integer("num_features", minimum=1)
        self._check_integer("seed")
        self._check_integer("redraw_interval", minimum=0)
        self._check_integer("window", minimum=0)
        if not isinstance(self.orthogonal, bool):
            raise TypeError(f"orthogonal must be True or False, got {self.orthogonal!r}.")
        if self.exact_below != "auto":
            if isinstance(self.exact_below, str):
                raise ValueError(f'exact_below must be "auto" or an integer, got {self.exact_below!r}.')
            self._check_integer("exact_below", minimum=0)
        for name, allowed in (
            ("features", (None, *SHARP_FEATURES)),
            ("statistics", STATISTICS),
            ("kernel", KERNELS),
        ):
            if getattr(self, name) not in allowed:
                choices = ", ".join(repr(choice) for choice in allowed)
                raise ValueError(f"{name} must be one of {choices}; got {getattr(self, name)!r}.")
        family = self.features or SHARP_FEATURES[0]
        forms = ("auto", *FACTORIZATIONS[family])
        if self.factorization not in forms:
            choices = ", ".join(map(repr, forms))
            raise ValueError(f"factorization of {family} must be one of {choices}; got {self.factorization!r}.")
        if family == "landmark" and self.statistics != "batch":
            raise ValueError(f'landmarks have no parameters to store; set statistics="batch", got {self.statistics!r}.')
        if family == "landmark" and self.kernel == "triton":
            raise ValueError('landmarks have no Triton kernel; use kernel="auto" or "torch".')

    def _check_integer(self, name: str, minimum: int | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}.")

    def exact_threshold(self, device_type: str, is_causal: bool, family: str | None = None) -> int:
        """Number of keys from which on the estimator runs.

        Args:
            device_type: "cpu", "cuda", ... as in `torch.device.type`.
            is_causal: causal attention is exact up to greater lengths, since softmax computes half of the pairs; a
                window, which costs much in bidirectional layers, makes no difference there.
            family: registry name of the features; those of causal landmarks take longer. None is a random feature.
        """
        if self.exact_below != "auto":
            return int(self.exact_below)
        measured = LANDMARK_CROSSOVER if family == "landmark" else CROSSOVER
        device_type = device_type if device_type in measured else "cuda"
        keys = measured[device_type][is_causal] * self.num_features
        return WINDOWED[device_type] * keys if self.window and not is_causal else keys

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary that JSON can hold; `from_dict` reverses it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> FavorConfig:
        """Validated options from a dictionary; absent ones take their defaults.

        Raises:
            ValueError: for an unknown option; the message lists the known ones.
        """
        options = dict(options or {})
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}.")
        return cls(**options)


def feature_family(backend: str, config: FavorConfig) -> tuple[str, dict[str, Any]]:
    """Registry name and options of the random features a backend stands for, as `favor.features.get` takes them."""
    name = FAMILIES[backend] or config.features or SHARP_FEATURES[0]
    return name, {"factorization": config.factorization} if len(FACTORIZATIONS.get(name, ())) > 1 else {}


# None: chosen by the option `features`.
FAMILIES: dict[str, str | None] = {
    "favor+": "pos",
    "favor_plus": "pos",
    "favor++": "gerf",
    "favor_plus_plus": "gerf",
    "favor#": None,
    "favor_sharp": None,
    "favor_trig": "trig",
    "favor_relu": "relu",
    "favor_elu": "elu",
}
BACKENDS: tuple[str, ...] = tuple(FAMILIES)
