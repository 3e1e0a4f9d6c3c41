"""What the benchmark times: attention of favor, torch, performer-pytorch and flash-linear-attention."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from favor import features
from favor.attention.directions import Draw, directions
from favor.attention.functional import favor_attention
from favor.eval.common.isolated import release_early, resident_peak, warm_libraries
from favor.eval.speed import reference
from favor.kernels import StreamState

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
GROUPS = ("favor", "sdpa", "eager", "performer", "flex", "fla")
PERFORMER = "performer-pytorch"
FLA = "flash-linear-attention"
MOST_COMPILED = 64  # lengths, directions and passes of FlexAttention in one process
WARM_UP = 1024  # tokens, long enough that every part of each method runs
# Landmarks are compared with their definition, which is quadratic, on a shorter cell, and at most to one percent: which
# of two keys that are almost alike is chosen depends on rounding.
LANDMARKS_CHECKED, LANDMARKS_TOLERANCE = 2048, 1e-2


@dataclass(frozen=True)
class Cell:
    """All values that determine the inputs of one cell, so that another process can make equal inputs."""

    length: int
    causal: bool
    backward: bool
    batch_size: int = 1
    heads: int = 8
    head_dim: int = 64
    num_features: int = 256
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    decode: bool = False  # the last token alone, after a state of all others, or with their keys and values

    @lru_cache(maxsize=2)  # noqa: B019  # cells are few, and all methods share the inputs of one
    def inputs(self) -> tuple[Tensor, ...]:
        """Draws normal query, key, value and output gradient `[B, H, L, d]`, of standard deviation 1.

        The first three require gradients if the cell has a backward pass.
        """
        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        shape, dtype = (self.batch_size, self.heads, self.length, self.head_dim), getattr(torch, self.dtype)
        drawn = [torch.randn(shape, generator=generator, device=self.device, dtype=dtype) for _ in range(4)]
        return *(tensor.requires_grad_(self.backward) for tensor in drawn[:3]), drawn[3]


def run_pass(attend: reference.Attend, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs one pass over the inputs of a cell; gives the output, and three gradients if they are required."""
    *tokens, slope = inputs
    if not tokens[0].requires_grad:
        with torch.no_grad():
            return (attend(*tokens),)
    out = attend(*tokens)
    return (out, *torch.autograd.grad(out, tokens, slope))


@dataclass(frozen=True)
class Method:
    """One way to compute attention; its name is that of its row in the tables."""

    name: str
    # Makes the function to time, and the float64 formula that gives the right output, for a cell.
    prepare: Callable[[Cell], tuple[reference.Attend, reference.Formula]]
    exponent: int = 1  # its time grows with this power of the length
    # Of its check: factor of the tolerance in half precision, smallest tolerance, greatest length.
    factor: float = 1.0
    least: float = 0.0
    checked: int | None = None
    refuses: Callable[[Cell], str | None] = lambda cell: None  # says why it cannot run a kind of cell

    def check(self, cell: Cell, formula: reference.Formula | None = None) -> reference.Check:
        """Compares the method with its formula, or with another one, on inputs of a cell."""
        cell = replace(cell, length=min(cell.length, self.checked or cell.length))
        attend, own = self.prepare(cell)
        factor = self.factor if getattr(torch, cell.dtype).itemsize == 2 else 1.0
        options = {"causal": cell.causal, "seed": cell.seed, "last": cell.decode}
        tolerance = max(self.least, factor * reference.TOLERANCE[cell.dtype])
        return reference.compare(attend, formula or own, *cell.inputs()[:3], tolerance=tolerance, **options)


def select(groups: Sequence[str], families: Sequence[str], device: str) -> list[Method]:
    """Lists the methods of some `GROUPS`, one per family and SDPA backend, even if they cannot run here."""
    backends = SDPA if device == "cuda" else ("flash", "math")
    names = {"favor": families, "sdpa": backends}
    found = [f"{group}:{name}".rstrip(":") for group in GROUPS if group in groups for name in names.get(group, [""])]
    return [by_name(PERFORMER if name == "performer" else name) for name in found]


def by_name(name: str) -> Method:
    """Makes the method with a name of the tables; raises ValueError for another name."""
    group, _, rest = name.partition(":")
    if group == "favor":
        return favor_method(rest)
    if group == "sdpa" and rest in SDPA:
        return Method(name, partial(_sdpa, rest), exponent=2, refuses=partial(_sdpa_problem, rest))
    if name == "eager":
        return Method(name, _eager, exponent=2)
    if name == PERFORMER:
        return Method(name, _performer, factor=4.0, refuses=_performer_problem)  # its sums have half precision too
    if name == "flex":
        return Method(name, _flex, exponent=2, refuses=_flex_problem)
    if name == "fla":
        return Method(name, _fla, refuses=_fla_problem)
    raise ValueError(f"expected the name of a method as in the tables, got {name!r}")


def favor_method(name: str) -> Method:
    """Makes `favor.favor_attention` with one family of features.

    The name wderf@128 means wderf with exact blocks of 128 tokens, landmark+256 means landmarks with 256 selected keys,
    and landmark alone those with as many as is the default.
    """
    first, at, window = name.partition("@")
    first, plus, keys = first.partition("+")
    known = [n for n, f in features.REGISTRY.items() if f.selects_keys or issubclass(f, features.PositiveFeatures)]
    numbers = [number for sign, number in ((at, window), (plus, keys)) if sign]
    is_landmark = first in known and features.REGISTRY[first].selects_keys
    if first not in known or not all(map(str.isdecimal, numbers)) or (at if is_landmark else plus):
        raise ValueError(
            f"expected features among {', '.join(known)}, alone, as NAME@WINDOW or as landmark+KEYS, got {name!r}"
        )
    prepare = partial(_favor, first, int(window or 0), int(keys) if plus else None)
    own: dict[str, Any] = {"checked": LANDMARKS_CHECKED, "least": LANDMARKS_TOLERANCE} if is_landmark else {}
    return Method(f"favor:{name}", prepare, **own)


def _favor(name: str, window: int, keys: int | None, cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    options: dict[str, Any] = {"features": name, "num_features": cell.num_features, "seed": cell.seed}
    attend = partial(favor_attention, **options, is_causal=cell.causal, window=window, selected_keys=keys)
    if cell.decode:
        attend = _decoding(attend)
    if features.REGISTRY[name].selects_keys:
        return attend, lambda sample: reference.landmarks(sample, cell.num_features, keys)
    omega = _omega(name, cell)
    return attend, lambda sample: reference.features(sample, name, omega[sample.head], window)


def _omega(name: str, cell: Cell) -> Tensor:
    """Gives the random directions `[H, M, d]` that `favor_attention` draws for a cell."""
    drawn = (cell.num_features, cell.head_dim, cell.heads, True, cell.seed, 0, 0, torch.device(cell.device))
    return directions(Draw(name, *drawn, torch.float64 if cell.dtype == "float64" else torch.float32))


def _decoding(attend: Callable[..., Tensor]) -> reference.Attend:
    """Makes a function that reads all tokens but the last at its first call, and takes a step with the last in each."""
    state = StreamState()

    def step(*tokens: Tensor) -> Tensor:
        if not state.tokens:
            attend(*(tensor[:, :, :-1] for tensor in tokens), state=state)
        return attend(*(tensor[:, :, -1:] for tensor in tokens), state=state)

    return step


def _sdpa(backend: str, cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPA[backend]):
            if cell.decode:
                return scaled_dot_product_attention(query[:, :, -1:], key, value)
            return scaled_dot_product_attention(query, key, value, is_causal=cell.causal)

    return attend, reference.softmax


@cache
def _sdpa_problem(backend: str, cell: Cell) -> str | None:
    """Tries a backend of torch once on a tiny cell of the kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives its reasons as warnings
        try:
            tiny = replace(cell, length=16)
            run_pass(_sdpa(backend, tiny)[0], tiny.inputs())
        except RuntimeError as error:
            return f"this backend does not run here ({str(error).strip().splitlines()[0].rstrip('.')})"
    return None


def _eager(cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    """Makes softmax attention as in a textbook: matrix product, softmax, matrix product."""
    hidden = None
    if cell.causal and not cell.decode:
        hidden = torch.ones(cell.length, cell.length, dtype=torch.bool, device=cell.device).triu_(1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query[:, :, -1:] if cell.decode else query
        logits = (query @ key.transpose(-1, -2)).mul_(cell.head_dim**-0.5)
        if hidden is not None:
            logits = logits.masked_fill_(hidden, -math.inf)
        return logits.softmax(-1) @ value

    return attend, reference.softmax


def _performer(cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    """Makes `FastAttention` of performer-pytorch with a projection drawn by the seed."""
    module = importlib.import_module("performer_pytorch")
    # A causal module prints that it falls back to its slow form.
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(cell.seed)
        fast = module.FastAttention(cell.head_dim, nb_features=cell.num_features, causal=cell.causal)
    fast = fast.to(cell.device)
    return fast, lambda sample: reference.performer(sample, fast.projection_matrix)


@cache
def _performer_problem(cell: Cell) -> str | None:
    if cell.decode:
        return "it has no state for single tokens"
    requirement = f"pip install {PERFORMER}==1.1.4"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated functions
            importlib.import_module("performer_pytorch")
    except ModuleNotFoundError as error:
        return f"not installed ({error.name} is missing; {requirement})"
    except Exception as error:  # an old package may fail on a new Python in any way
        return f"cannot be imported ({type(error).__name__}: {error}; {requirement})"
    return None


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    # With a length that may change, or in parts that are not compiled, it is slower. So each length is compiled.
    torch._dynamo.config.recompile_limit = MOST_COMPILED
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    """Makes FlexAttention of torch; a causal cell gets a mask that leaves out blocks of the future."""
    mask = None
    if cell.causal and not cell.decode:
        make = torch.compile(create_block_mask)  # else it makes all L x L values of the mask
        mask = make(lambda b, h, q, k: q >= k, None, None, cell.length, cell.length, device=cell.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _compiled_flex()(query[:, :, -1:] if cell.decode else query, key, value, block_mask=mask)

    return attend, reference.softmax


def _flex_problem(cell: Cell) -> str | None:
    return None if cell.device == "cuda" else "it is measured on a GPU alone"


def _fla(cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    """Makes causal linear attention of flash-linear-attention with the features of `pos`, so that states are equal.

    Torch computes the features; the kernel takes `[B, L, H, M]` and divides by the sum of weights.
    """
    chunked = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    omega = _omega("pos", cell)

    def feature(tokens: Tensor, dims: tuple[int, ...]) -> Tensor:
        tokens = tokens * cell.head_dim**-0.25
        logits = tokens @ omega.to(tokens).mT - tokens.square().sum(-1, keepdim=True) / 2
        return (logits - logits.detach().amax(dims, keepdim=True)).exp().transpose(1, 2)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = (feature(query, (-1,)), feature(key, (-2, -1)), value.transpose(1, 2))
        return chunked(*given, scale=1.0, normalize=True)[0].transpose(1, 2)

    return attend, lambda sample: reference.features(sample, "pos", omega[sample.head])


def _fla_problem(cell: Cell) -> str | None:
    if not cell.causal or cell.decode:
        return "only its causal kernel for whole sequences is measured"
    if cell.device != "cuda":
        return "it runs on a GPU alone"
    return None if importlib.util.find_spec("fla") else f"not installed (pip install {FLA})"


def peak_of(name: str, cell: Cell) -> int:
    """Measures peak bytes of one pass in the calling process, after a pass at a short length and with all inputs."""
    release_early()
    method = by_name(name)
    warnings.simplefilter("ignore")
    short = replace(cell, length=min(WARM_UP, cell.length))
    run_pass(method.prepare(short)[0], short.inputs())
    attend, inputs = method.prepare(cell)[0], cell.inputs()
    warm_libraries()
    return resident_peak(lambda: run_pass(attend, inputs))[1]
