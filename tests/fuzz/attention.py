"""A call of `favor_attention` in plain words and numbers, and how to draw one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from favor.features import Parameters
from favor.kernels import StreamState
from favor.landmark import Landmarks
from favor.registry import get

FEATURES = ("pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "landmark", "trig", "relu", "elu")
LENGTHS = (1, 2, 3, 5, 0, 8, 12, 17, 33, 64, 65, 80, 100, 200)
NORMS = (1.0, 1e-3, 0.1, 3.0, 10.0, 36.0, 100.0, 300.0, 1e3, 1e4)
# Beside "none": what share of the keys is hidden, and where.
PADDING = ("none", "left", "right", "middle", "every second", "all but one", "all")
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Call:
    """One call; every default is the simplest value.

    Attributes:
        padding: of each row of the batch; the rows are as many as there are entries.
        packed: lengths of the queries and of the keys of packed sequences; `length` and `keys` then do not count.
    """

    features: str = "pos"
    length: int = 1
    keys: int = 1
    padding: tuple[str, ...] = ("none",)
    packed: tuple[tuple[int, int], ...] = ()
    is_causal: bool = False
    window: int = 0
    num_features: int = 4
    key_heads: int = 1
    groups: int = 1
    dim: int = 4
    value_dim: int = 4
    dtype: str = "float32"
    query_norm: float = 1.0
    key_norm: float = 1.0
    kind: str = "random"  # of the keys, see `_keys`
    scale: float | None = None
    factorization: str = "auto"
    use_statistics: bool = True
    given: tuple[bool, bool] = (False, False)  # whether parameters are given, and whether they are corrected
    selected: int = 0  # keys that landmarks select
    pieces: int = 0  # in which the call is repeated with a state
    seed: int = 0

    @property
    def family(self) -> Any:
        options = {} if self.factorization == "auto" else {"factorization": self.factorization}
        return get(self.features, **options)

    @property
    def type(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def is_self(self) -> bool:
        # Every query is the token of a key: the last ones, if there are more keys.
        return self.is_causal or self.length == self.keys

    @property
    def lengths(self) -> tuple[int, int]:
        if self.packed:
            return sum(pair[0] for pair in self.packed), sum(pair[1] for pair in self.packed)
        return self.length, self.keys

    @property
    def may_be_refused(self) -> bool:
        """Whether a ValueError may be the right answer."""
        family, pairs = self.family, self.packed or ((self.length, self.keys),)
        no_state = self.pieces and (not family.supports_state or not self.is_causal or self.packed)
        return bool(
            (self.is_causal and any(rows > columns for rows, columns in pairs))
            or (self.window and not family.supports_window)
            or (self.window and not self.is_causal and any(rows != columns for rows, columns in pairs))
            or (any(self.given) and not family.takes_parameters)
            or no_state
            or (self.pieces and self.length != self.keys)
            or (self.features == "trig" and self.num_features % 2)
        )

    @property
    def logits(self) -> float:
        """The largest size of a logit."""
        scale = self.dim**-0.5 if self.scale is None else self.scale
        return scale * self.query_norm * self.key_norm

    @property
    def is_exact(self) -> bool:
        """Whether it has to equal softmax attention."""
        keys = self.lengths[1]
        is_fine = (self.num_features >= keys and not self.is_causal) or self.selected >= keys
        return (isinstance(self.family, Landmarks) and is_fine) or self.window >= keys > 0

    def mask(self) -> Tensor | None:
        """True for real keys, `[B, S]`; None if all are."""
        if self.packed or set(self.padding) == {"none"}:
            return None
        place = torch.arange(self.keys)
        hidden = {
            "none": place < 0,
            "left": place < self.keys * 7 // 10,
            "right": place >= self.keys - self.keys * 7 // 10,
            "middle": (place >= self.keys // 5) & (place < self.keys * 9 // 10),
            "every second": place % 2 == 0,
            "all but one": place != self.keys // 2,
            "all": place >= 0,
        }
        return torch.stack([~hidden[name] for name in self.padding])

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        (rows, columns), batch = self.lengths, len(self.padding)

        def unit(heads: int, length: int) -> Tensor:
            rows = torch.randn(batch, heads, length, self.dim, generator=generator, dtype=torch.float64)
            return torch.nn.functional.normalize(rows, dim=-1)

        query = self.query_norm * unit(self.key_heads * self.groups, rows)
        key = self.key_norm * _keys(self.kind, unit(self.key_heads, columns))
        value = torch.randn(batch, self.key_heads, columns, self.value_dim, generator=generator, dtype=torch.float64)
        return [tensor.to(self.type) for tensor in (query, key, value)]

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `favor_attention`, without masks."""
        options: dict[str, Any] = {
            "features": self.family,
            "num_features": self.num_features,
            "is_causal": self.is_causal,
            "window": self.window,
            "scale": self.scale,
            "seed": self.seed % 2,
            "use_statistics": self.use_statistics,
            "state": StreamState() if self.pieces else None,
            "selected_keys": self.selected,
        }
        for index, name in enumerate(("parameters", "correction")):
            if self.given[index]:
                options[name] = self._parameters(index)
        for index, name in enumerate(("cu_seqlens_q", "cu_seqlens_k") if self.packed else ()):
            options[name] = torch.tensor([0, *(pair[index] for pair in self.packed)]).cumsum(0)
        return options

    def _parameters(self, seed: int) -> Parameters:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.key_heads, self.dim, self.dim)
        noise = [0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
        eye = torch.eye(self.dim, dtype=torch.float64)
        transform, factor = eye + noise[0], eye + noise[1] @ noise[1].mT
        return Parameters(transform, torch.linalg.inv(transform), factor, shift=noise[0][:, 0])


def _keys(kind: str, keys: Tensor) -> Tensor:
    """Keys `[B, Hk, S, d]` of length 1 at most, made of random ones."""
    length = keys.shape[2]
    if kind == "equal":
        return keys[:, :, :1].expand_as(keys)
    if kind == "few":
        return keys[:, :, torch.arange(length) % 3 * length // 3] if length else keys
    if kind == "biased":  # as where the projection has a large bias
        return 0.9 * keys[:, :, :1] + 0.1 * keys
    if kind == "rising":
        return keys * torch.linspace(0.01, 1, length, dtype=keys.dtype).unsqueeze(-1)
    return keys


def draw(choose: Choose) -> Call:
    """A call; `choose` takes one of several values, of which the first ones are the simplest."""
    features = choose(FEATURES)
    family = get(features)
    is_causal, length = choose((False, True)), choose(LENGTHS)
    keys = length if choose((True, True, False)) else choose(LENGTHS)
    is_packed = choose((False,) * 6 + (True,))
    batch = 1 if is_packed else choose((1, 2, 3))
    packed = tuple((choose(LENGTHS[:8]),) * 2 for _ in range(choose((1, 2, 3)))) if is_packed else ()
    if packed and not choose((True, True, False)):
        packed = tuple((rows, choose(LENGTHS[:8])) for rows, _ in packed)
    padded = not is_packed and choose((True, False))
    norm = choose(NORMS)
    can_stream = family.supports_state and is_causal and not is_packed and length == keys
    return Call(
        features=features,
        length=length,
        keys=keys,
        padding=tuple(choose(PADDING) if padded else "none" for _ in range(batch)),
        packed=packed,
        is_causal=is_causal,
        window=choose((0,) * 6 + (4, 7, 16, 64, 256, 1)) if family.supports_window else choose((0,) * 30 + (8,)),
        num_features=choose((4, 2, 8, 16, 1, 7, 256)) if features != "trig" else choose((4, 2, 8, 16, 256, 7)),
        key_heads=choose((1, 2)),
        groups=choose((1, 2, 3)),
        dim=choose((4, 1, 3, 8, 16)),
        value_dim=choose((4, 1, 3, 8, 16)),
        dtype=choose(("float32", "float32", "float64", "bfloat16", "float16")),
        query_norm=norm,
        key_norm=norm if choose((True, True, False)) else choose(NORMS),
        kind=choose(("random", "random", "random", "equal", "few", "biased", "rising")),
        scale=choose((None, None, None, 1.0, 0.01)),
        factorization=choose(("auto", "auto", *family.factorizations)) if len(family.factorizations) > 1 else "auto",
        use_statistics=choose((True, True, True, False)),
        given=tuple(family.takes_parameters and choose((False,) * often + (True,)) for often in (5, 9)),
        selected=choose((0, 16, 8, 256, 1, 5)) if family.selects_keys else 0,
        pieces=choose((0, 2, 3, 5, length)) if can_stream else choose((0,) * 30 + (2,)),
        seed=choose(range(1000)),
    )
