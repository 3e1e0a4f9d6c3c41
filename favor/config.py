"""`FavorConfig`: every option that a user can set, checked."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from favor import registry
from favor.kernels import KERNELS

STATISTICS = ("batch", "calibrated", "corrected")
MOST_FEATURES = 2**18  # 64 MiB of directions per head of 64: more is a typing mistake
MOST_TOKENS = 2**31 - 1  # no sequence is longer, and kernels count in int32
MOST_HEADS = 2**14  # of a layer
_GONE = ("page_size", "query_block")  # of landmarks, in configs of older versions
BACKEND = "attn_implementation"  # entry of `config.favor` that names the backend of a saved model; not an option


@dataclass(frozen=True)
class FavorConfig:
    """Options of the FAVOR backends; a model carries them as the plain dictionary `config.favor`.

    Args:
        num_features: number of random features M per head, default 256, at most 262,144. `favor_elu` always has
            head_dim features, and `favor_trig` needs an even number. Landmarks have M means in encoders; their causal
            layers have one mean for each 256 keys, and do not read it.
        features: family behind the `favor#` backend: "wderf" (default: closest to softmax on pretrained models, see
            `favor.eval.approximation`), "cderf", or the FAVOR# paper's own "sderf", "saderf" and "aderf"; or
            "landmark", the older spelling of the backend `landmark`. Backends with a single family ignore it.
        factorization: how the families of favor# factor their matrices: "eigh" (the optimum); "newton_schulz" for
            "sderf" and "aderf" (the same optimum, by matrix products alone); "cholesky" for "wderf", "cderf" and
            "sderf" (no eigendecomposition; within 0.0071 of the optimal objective per direction). "auto" (default) is
            "eigh" on a CPU, and elsewhere the first of the others, since GPUs decompose the matrices of a batch one by
            one.
        window: tokens are cut into blocks of this many, and attention inside a block is exact, under one normaliser
            with the estimate of the rest. 0 (default) is the papers' method; 64 to 256 is far closer to softmax. Cross
            attention has no such blocks and runs without a window, and so do landmarks.
        orthogonal: orthogonal directions (default) or independent ones.
        seed: seed of the directions, default 0. Each layer has its own.
        redraw_interval: in training, the number of forward passes of a layer after which it draws new directions; 0
            (default) never. Evaluation always uses the same directions.
        statistics: where data-dependent parameters come from. "batch" (default) takes them from each sequence; causal
            layers and the cross attention of decoders then fall back to those of FAVOR+, since statistics of a whole
            sequence would show its tokens the future (see `favor.favor_attention`). "calibrated" takes the parameters
            that `favor.calibrate` stored in the model, for causal layers too. "corrected" takes those of each sequence
            and changes them by what `favor.train.distill` learned for each head; not for causal layers.
        exact_below: layers with fewer keys than this run exact softmax attention, which is then faster and has no
            error. "auto" (default) is the length where exact and linear attention take equally long, measured by
            `favor.eval.speed` for each kind of device: see `exact_threshold`. 0 never runs exact attention. An exported
            program (`torch.export`, ONNX) cannot choose by length: for lengths below and above the threshold it needs
            0.
        selected_keys: for landmarks, how many keys each block of queries attends to exactly, chosen for it among all; 0
            for none. Default None: 768 in encoders, 1,024 in causal layers (docs/selected_keys.md). It may exceed the
            sequence, at no cost, as `window` may.
        frequencies: for landmarks of models with sinusoidal relative positions (Transformer-XL, FastConformer): in how
            many frequencies, the lowest, the positions of far keys are held. Default None: all, which loses nothing.
            Near keys are exact in any case.
        kernel: "auto" (default) computes with Triton on CUDA and in blocks of plain torch elsewhere; "torch" and
            "triton" force one of them, see `favor.kernels.available()`.

    Raises:
        ValueError, TypeError: naming the option, what was expected and what came.

    Example:
        >>> import favor
        >>> favor.FavorConfig(num_features=64).window
        0
        >>> favor.FavorConfig(num_features=0)
        Traceback (most recent call last):
        ValueError: ...
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
    selected_keys: int | None = None
    frequencies: int | None = None

    def __post_init__(self) -> None:
        self._check_integer("num_features", 1, MOST_FEATURES)
        self._check_integer("seed")
        self._check_integer("redraw_interval", 0)
        self._check_integer("window", 0, MOST_TOKENS)
        if self.selected_keys is not None:
            self._check_integer("selected_keys", 0, MOST_TOKENS)
        if self.frequencies is not None:
            self._check_integer("frequencies", 0, MOST_FEATURES)
        if not isinstance(self.orthogonal, bool):
            raise TypeError(f"orthogonal must be True or False, got {self.orthogonal!r}.")
        if self.exact_below != "auto":
            if isinstance(self.exact_below, str):
                raise ValueError(f'exact_below must be "auto" or an integer, got {self.exact_below!r}.')
            self._check_integer("exact_below", 0)
        forms = dict.fromkeys(form for family in registry.FAMILIES.values() for form in family.factorizations)
        for name, allowed in (
            ("features", (None, *registry.selectable())),
            ("factorization", ("auto", *forms)),
            ("statistics", STATISTICS),
            ("kernel", KERNELS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                choices, hint = ", ".join(map(repr, allowed)), registry.did_you_mean(value, allowed)
                raise ValueError(f"{name} must be one of {choices}; got {value!r}.{hint}")
        if self.features is not None:
            self.check_family(registry.FAMILIES[self.features])

    def check_family(
        self, family: type[registry.Family], backend: str | None = None, given: Collection[str] | None = None
    ) -> None:
        """Raises a ValueError for options that a family does not have.

        Args:
            family: the class.
            backend: its name in the message; by default that of the family.
            given: options that were asked for now. A model keeps options of other backends too, in case it returns to
                them. None means all options.
        """
        called, forms = backend or family.name, ("auto", *(family.factorizations or ("eigh",)))
        if (given is None or family.factorizations) and self.factorization not in forms:
            choices = ", ".join(map(repr, forms))
            raise ValueError(f"factorization of {family.name} must be one of {choices}; got {self.factorization!r}.")
        self._check_ignored(family, called, given or ())
        if self.window and family.selects_keys:
            if given is not None and "window" in given:
                raise ValueError(
                    f"{called} has no window: it reads the keys that matter, near or far, and causal layers always "
                    f"read the last ones. Set window=0 and raise selected_keys; got window={self.window}."
                )
            window = f"window={self.window} is not read. Raise selected_keys instead."
            warn_once(f"{family.name} has no window any more, and {window}")
        elif self.window and not family.supports_window:
            raise ValueError(f"{called} does not estimate exp(x.y), and has no window: use favor+, favor++ or favor#.")
        if self.statistics != "batch" and not family.takes_parameters and (given is None or "statistics" in given):
            raise ValueError(f'{called} attention has no parameters to store: set statistics="batch".')
        if self.kernel not in ("auto", "torch") and not family.has_kernel and (given is None or "kernel" in given):
            raise ValueError(f'{called} attention has no Triton kernel; use kernel="auto" or "torch".')

    def _check_ignored(self, family: type[registry.Family], called: str, given: Collection[str]) -> None:
        """Raises a ValueError for options that were asked for now and that a family does not read."""
        chooses = called not in registry.BACKENDS or len(registry.BACKENDS[called]) > 1
        is_read = {
            "num_features": family.counts_features,
            "orthogonal": family.is_drawn,
            "redraw_interval": family.is_drawn,
            "selected_keys": family.selects_keys,
            "frequencies": family.selects_keys,
            "features": chooses or self.features == family.name,
        }
        for name in given:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if not is_read.get(name, True) and value != default:
                raise ValueError(f"{called} attention does not read {name}, got {name}={value!r}.")

    def _check_integer(self, name: str, minimum: int | None = None, maximum: int | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}.")
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}.")
        if maximum is not None and value > maximum:
            raise ValueError(f"{name} must be at most {maximum}, got {value}.")

    def exact_threshold(self, device_type: str, is_causal: bool, family: str | None = None) -> int:
        """Gives the number of keys from which on the estimator runs.

        Args:
            device_type: "cpu", "cuda", ... as in `torch.device.type`.
            is_causal: causal attention is exact up to greater lengths, since softmax computes half of the pairs; a
                window costs much in bidirectional layers and makes no difference in causal ones.
            family: name of the family, whose class knows its crossover; None is a random feature.
        """
        if self.exact_below != "auto":
            return int(self.exact_below)
        measured = registry.FAMILIES.get(family or "", registry.Family)
        device_type = device_type if device_type in measured.crossover else "cuda"
        if measured.crossover_keys:
            return measured.crossover_keys[device_type][is_causal]
        keys = measured.crossover[device_type][is_causal] * self.num_features
        return measured.windowed[device_type] * keys if self.window and not is_causal else keys

    def selected(self, family: str, is_causal: bool) -> int:
        """Gives the number of selected keys of a layer; 0 for families that select none."""
        known = registry.FAMILIES[family]
        if not known.selects_keys:
            return 0
        return known.default_selected[is_causal] if self.selected_keys is None else self.selected_keys

    def to_dict(self) -> dict[str, Any]:
        """Gives a plain dictionary that JSON can hold; `from_dict` reverses it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> FavorConfig:
        """Checks options from a dictionary; absent ones take their defaults, and the name of a backend is left out.

        Raises:
            ValueError: for an unknown option; the message lists the known ones. TypeError: if it is not a dictionary.
        """
        if not isinstance(options, Mapping | None):
            raise TypeError(f"config.favor must be a dictionary of options, got {options!r}.")
        options = {name: value for name, value in (options or {}).items() if name != BACKEND}
        gone = [name for name in _GONE if options.pop(name, 0)]
        if gone:
            warn_once(f"options of an older version are left out: {', '.join(gone)}. Landmarks have no such sizes now.")
        known = [field.name for field in fields(cls)]
        unknown = sorted(map(str, set(options) - set(known)))
        if unknown:
            hint = registry.did_you_mean(unknown[0], known)
            raise ValueError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}.{hint}")
        return cls(**options)


@cache
def warn_once(message: str) -> None:
    """Warns in the log, once for each message."""
    logging.getLogger("favor").warning("favor: %s", message)


def feature_family(backend: str, config: FavorConfig, given: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """Gives the name and options of the family that a backend runs, as `favor.features.get` takes them.

    Raises a ValueError for features that the backend does not run, and for options that the family does not have;
    `given` are those that were asked for now, see `FavorConfig.check_family`.
    """
    family = registry.family_of(backend, config.features)
    config.check_family(family, backend, given)
    return family.name, {"factorization": config.factorization} if len(family.factorizations) > 1 else {}
