"""Methods of the benchmark: FAVOR attention, torch's softmax attention, and linear attention of other packages."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from favor import features as families
from favor.attention.directions import Draw, directions
from favor.attention.functional import favor_attention
from favor.eval.speed import reference
from favor.eval.speed.cell import Attend, Cell, run_pass
from favor.eval.speed.landmarks import landmark_rows
from favor.landmark.causal import SECTION, SHARE

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PERFORMER_CHUNKS = 128
GROUPS = ("favor", "sdpa", "eager", "performer", "fla")


@dataclass(frozen=True)
class Prepared:
    """A method made for one cell.

    Attributes:
        attend: the function to time, `(query, key, value) -> output`, on inputs in the method's own layout.
        rows: the float64 formula that gives the right output.
        layout: changes `[B, H, L, d]` to the method's own layout, and also back; it is not timed.
    """

    attend: Attend
    rows: Callable[[reference.Sample], reference.Rows]
    layout: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def check(self, cell: Cell, query: Tensor, key: Tensor, value: Tensor, factor: float = 1.0) -> reference.Check:
        """Compares the method with the formula on the cell's own inputs.

        Args:
            cell: sizes and direction.
            query: `[B, H, L, d]`.
            key: `[B, Hk, L, d]`.
            value: `[B, Hk, L, d]`.
            factor: of the tolerance.
        """

        def attend(*inputs: Tensor) -> Tensor:
            return self.layout(self.attend(*map(self.layout, inputs)))

        return reference.compare(
            attend,
            self.rows,
            query,
            key,
            value,
            causal=cell.causal,
            backward=cell.backward,
            factor=factor,
            seed=cell.seed,
        )


class Method(ABC):
    """One way to compute attention.

    Attributes:
        name: name of its row in the tables.
        exponent: its time grows with this power of the length.
        factor: factor of the tolerance of its check, in half precision.
    """

    name: str
    exponent: int = 1
    factor: float = 1.0

    def missing(self) -> str | None:
        """Says why the method cannot run on this machine, and how to install it; None if it can run."""
        return None

    def refuses(self, cell: Cell) -> str | None:
        """Says why the method cannot run this kind of cell; None if it can."""
        return None

    def scratch_bytes(self, cell: Cell) -> int:
        """Estimates the memory that the method needs beyond a few copies of its inputs; 0 if it needs no more."""
        return 0

    @abstractmethod
    def prepare(self, cell: Cell) -> Prepared:
        """Makes the function to time and the formula to check it with."""

    @abstractmethod
    def flops(self, cell: Cell) -> float:
        """Counts the floating-point operations of the pass, as the report states."""


def _linear_flops(cell: Cell, per_feature: int, num_features: int) -> float:
    passes = 3 if cell.backward else 1
    tokens = cell.batch_size * cell.heads * cell.length
    return float(passes * per_feature * num_features * cell.head_dim * tokens)


class Softmax(Method):
    """Base of the kinds of exact attention."""

    exponent = 2

    def flops(self, cell: Cell) -> float:
        """Counts 4 L d operations per token and head, half of that if causal; 3.5 times that with the backward pass."""
        count = 4 * cell.length**2 * cell.head_dim * cell.batch_size * cell.heads
        return count * (3.5 if cell.backward else 1.0) * (0.5 if cell.causal else 1.0)

    def matrices(self, cell: Cell, itemsize: int) -> int:
        """Counts the bytes of the L x L matrices that exist at a time: three, or five with the backward pass."""
        return (5 if cell.backward else 3) * cell.batch_size * cell.heads * cell.length**2 * itemsize


class Sdpa(Softmax):
    """`torch.nn.functional.scaled_dot_product_attention` with one of its backends."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"sdpa:{backend}"

    def refuses(self, cell: Cell) -> str | None:
        """Tries the backend once on a tiny cell of the kind."""
        return _sdpa_problem(self.backend, replace(cell, length=16))

    def scratch_bytes(self, cell: Cell) -> int:
        """Counts the matrices of the math backend, at least in float32; other backends hold none."""
        return self.matrices(cell, max(cell.itemsize, 4)) if self.backend == "math" else 0

    def prepare(self, cell: Cell) -> Prepared:
        """Makes SDPA with only this backend allowed."""
        grouped = cell.heads != cell.key_heads

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(SDPA[self.backend]):
                return scaled_dot_product_attention(query, key, value, is_causal=cell.causal, enable_gqa=grouped)

        return Prepared(attend, reference.softmax_rows)


@cache
def _sdpa_problem(backend: str, tiny: Cell) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives its reasons as warnings
        try:
            run_pass(Sdpa(backend).prepare(tiny).attend, *tiny.inputs())
        except RuntimeError as error:
            return f"this backend does not run here ({str(error).strip().splitlines()[0].rstrip('.')})"
    return None


class Eager(Softmax):
    """Softmax attention as in a textbook: matrix product, softmax, matrix product."""

    name = "eager"

    def scratch_bytes(self, cell: Cell) -> int:
        """Counts logits and weights, in the type of the inputs."""
        return self.matrices(cell, cell.itemsize)

    def prepare(self, cell: Cell) -> Prepared:
        """Makes attention that joins the queries of heads that share a key, so that no key is repeated."""
        group = cell.heads // cell.key_heads
        hidden = None
        if cell.causal:
            ones = torch.ones(cell.length, cell.length, dtype=torch.bool, device=cell.device)
            hidden = ones.triu_(1)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            logits = query.unflatten(1, (-1, group)) @ key.unsqueeze(2).transpose(-1, -2)
            logits = logits.mul_(cell.head_dim**-0.5)
            if hidden is not None:
                logits = logits.masked_fill_(hidden, -math.inf)
            return (logits.softmax(-1) @ value.unsqueeze(2)).flatten(1, 2)

        return Prepared(attend, reference.softmax_rows)


class Favor(Method):
    """`favor.favor_attention` with one family of features.

    The name wderf@128 means wderf with exact blocks of 128 tokens, landmark+256 means landmarks with 256 selected keys,
    and landmark alone those with as many as is the default.
    """

    def __init__(self, name: str) -> None:
        features, at, window = name.partition("@")
        features, plus, keys = features.partition("+")
        family = families.REGISTRY.get(features)
        numbers = [number for sign, number in ((at, window), (plus, keys)) if sign]
        if family is None or not all(map(str.isdecimal, numbers)) or (at if family.selects_keys else plus):
            raise ValueError(
                f"expected features among {', '.join(families.REGISTRY)}, alone, as NAME@WINDOW or as landmark+KEYS, "
                f"got {name!r}"
            )
        self.features, self.family, self.name = features, family, f"favor:{name}"
        self.window, self.keys = int(window or 0), int(keys) if plus else None

    def scratch_bytes(self, cell: Cell) -> int:
        """Counts features of any sign, which are held for all tokens; positive features are not."""
        if not issubclass(self.family, families.SignedFeatures):
            return 0
        return (12 if cell.backward else 4) * cell.batch_size * cell.heads * cell.length * cell.num_features * 4

    def prepare(self, cell: Cell) -> Prepared:
        """Makes `favor_attention` with the options of the cell."""
        keys = self.selected(cell)
        attend = partial(
            favor_attention,
            features=self.features,
            num_features=cell.num_features,
            is_causal=cell.causal,
            seed=cell.seed,
            window=self.window,
            selected_keys=keys,
        )
        if self.family.selects_keys:
            return Prepared(attend, lambda s: landmark_rows(s, cell.num_features, keys))
        dtype = torch.float64 if cell.dtype == "float64" else torch.float32
        drawn = (cell.num_features, cell.head_dim, cell.key_heads, True, cell.seed, 0, 0, torch.device(cell.device))
        omega = directions(Draw(self.features, *drawn, dtype))
        return Prepared(attend, lambda s: reference.favor_rows(s, self.features, omega[s.key_head], self.window))

    def selected(self, cell: Cell) -> int:
        """Gives the number of selected keys."""
        return self.family.default_selected[cell.causal] if self.keys is None else self.keys

    def flops(self, cell: Cell) -> float:
        """Counts 8 M d + 4 window d per token and head, and with a backward pass thrice that.

        Landmarks: 4 d for each mean and each key that is read. Searches are not counted.
        """
        if not self.family.selects_keys:
            features = cell.head_dim if self.features == "elu" else cell.num_features
            per_feature = self.family.operations
            return _linear_flops(cell, per_feature, features) + _linear_flops(cell, 4, self.window)
        keys = min(self.selected(cell), cell.length)
        means = min(cell.num_features, cell.length)
        if cell.causal:
            keys += keys // SHARE + min(SECTION, cell.length) // 2
            means = cell.length // SECTION // 2
        return _linear_flops(cell, 4, means + keys)


class Performer(Method):
    """`FastAttention` of the package performer-pytorch."""

    name = "performer-pytorch"
    factor = 4.0  # it keeps exponents and sums in half precision too

    def missing(self) -> str | None:
        """Says why the package cannot be imported; None if it can."""
        return _problem("performer_pytorch", "performer-pytorch==1.1.4")

    def scratch_bytes(self, cell: Cell) -> int:
        """Counts features of all tokens; if causal (without its CUDA extension) also L/128 products [chunk, M, d]."""
        heads = cell.batch_size * cell.heads * cell.itemsize
        count = (12 if cell.backward else 6) * heads * cell.length * cell.num_features
        if cell.causal:
            chunks = PERFORMER_CHUNKS if cell.backward else 1
            rows = -(-cell.length // PERFORMER_CHUNKS)
            count += 3 * chunks * heads * rows * cell.num_features * cell.head_dim
        return count

    def prepare(self, cell: Cell) -> Prepared:
        """Makes its module with a projection drawn by the seed; shared keys are repeated, since it has no groups."""
        module = _load("performer_pytorch")
        # A causal module prints that it falls back to its slow form.
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(cell.seed)
            fast = module.FastAttention(cell.head_dim, nb_features=cell.num_features, causal=cell.causal)
        fast = fast.to(cell.device)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return fast(query, _repeated(key, cell, 1), _repeated(value, cell, 1))

        return Prepared(attend, lambda s: reference.performer_rows(s, fast.projection_matrix))

    def flops(self, cell: Cell) -> float:
        """Counts the operations of a pass as for FAVOR: M features per token and head."""
        return _linear_flops(cell, 8, cell.num_features)


class Fla(Method):
    """`chunk_linear_attn` of flash-linear-attention, its closest method: identity map, no normaliser."""

    name = "fla"

    def missing(self) -> str | None:
        """Says that there is no GPU, or why the package cannot be imported; None if it can run."""
        if not torch.cuda.is_available():
            return "it runs on CUDA only (pip install flash-linear-attention)"
        return _problem("fla.ops.linear_attn", "flash-linear-attention")

    def refuses(self, cell: Cell) -> str | None:
        """Refuses bidirectional cells and cells that are not on CUDA."""
        if not cell.causal:
            return "it is causal only"
        return None if cell.device == "cuda" else "it runs on CUDA only"

    def prepare(self, cell: Cell) -> Prepared:
        """Makes its function, with inputs `[B, L, H, d]`; shared keys are repeated."""
        chunked = _load("fla.ops.linear_attn").chunk_linear_attn

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return chunked(query, _repeated(key, cell, 2), _repeated(value, cell, 2), normalize=False)[0]

        return Prepared(attend, reference.linear_rows, layout=lambda tensor: tensor.transpose(1, 2).contiguous())

    def flops(self, cell: Cell) -> float:
        """Counts 4 d^2 per token and head, three times that with the backward pass."""
        return _linear_flops(cell, 4, cell.head_dim)


def _repeated(tensor: Tensor, cell: Cell, dim: int) -> Tensor:
    group = cell.heads // cell.key_heads
    return tensor if group == 1 else tensor.repeat_interleave(group, dim)


def _load(module: str):  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as deprecations in other packages
        return importlib.import_module(module)


@cache
def _problem(module: str, requirement: str) -> str | None:
    try:
        _load(module)
    except ModuleNotFoundError as error:
        return f"not installed ({error.name} is missing; pip install {requirement})"
    except Exception as error:  # an old package may fail on a new Python in any way
        return f"cannot be imported ({type(error).__name__}: {error}; pip install {requirement})"
    return None


def select(groups: Sequence[str], features: Sequence[str], device: str) -> list[Method]:
    """Lists the methods of some of `GROUPS`, one per family and SDPA backend, even if they cannot run on this machine.

    Args:
        groups: names of groups.
        features: families of `favor_attention`, with options as in `Favor`.
        device: "cpu" or "cuda".

    Raises:
        ValueError: for an unknown group or feature family.
    """
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        raise ValueError(f"expected methods among {', '.join(GROUPS)}, got {', '.join(unknown)}")
    backends = tuple(SDPA) if device == "cuda" else ("flash", "math")
    made: dict[str, list[Method]] = {
        "favor": [Favor(name) for name in features],
        "sdpa": [Sdpa(backend) for backend in backends],
        "eager": [Eager()],
        "performer": [Performer()],
        "fla": [Fla()],
    }
    return [method for group in GROUPS if group in groups for method in made[group]]


def preload() -> None:
    """Imports the optional packages, so that forked processes need not."""
    Performer().missing()


def by_name(name: str) -> Method:
    """Makes the method with a name of the tables."""
    group, _, rest = name.partition(":")
    if group == "favor":
        return Favor(rest)
    if group == "sdpa":
        return Sdpa(rest)
    for method in (Eager(), Performer(), Fla()):
        if method.name == name:
            return method
    raise ValueError(f"expected the name of a method as in the tables, got {name!r}")
