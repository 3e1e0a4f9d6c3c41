"""What the benchmark times: attention of favor, torch and performer-pytorch, and whole models with random weights."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import favor
from favor import features
from favor.attention.directions import Draw, directions
from favor.attention.functional import favor_attention
from favor.eval.common.isolated import release_early, resident_peak, warm_libraries
from favor.eval.speed import reference

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
GROUPS = ("favor", "sdpa", "eager", "performer")
PERFORMER = "performer-pytorch"
WARM_UP = 1024  # tokens, long enough that every part of each method runs
# Landmarks are compared with their definition, which is quadratic, on a shorter cell, and at most to one percent: which
# of two keys that are almost alike is chosen depends on rounding.
LANDMARKS_CHECKED, LANDMARKS_TOLERANCE = 2048, 1e-2
# Whole models: the shape of BERT-base, and of a decoder with grouped heads of the same size.
MODELS = ("bert", "llama")
BACKENDS = ("sdpa", "favor+", "favor++", "favor#")
HIDDEN, MODEL_HEADS, MODEL_KEY_HEADS = 768, 12, 4


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
        options = {"causal": cell.causal, "seed": cell.seed}
        options["tolerance"] = max(self.least, factor * reference.TOLERANCE[cell.dtype])
        return reference.compare(attend, formula or own, *cell.inputs()[:3], **options)


def select(groups: Sequence[str], families: Sequence[str], device: str) -> list[Method]:
    """Lists the methods of some `GROUPS`, one per family and SDPA backend, even if they cannot run here."""
    backends = SDPA if device == "cuda" else ("flash", "math")
    names = {"favor": families, "sdpa": backends, "eager": [""], "performer": [""]}
    found = [f"{group}:{name}".rstrip(":") for group in GROUPS if group in groups for name in names[group]]
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
    if features.REGISTRY[name].selects_keys:
        return attend, lambda sample: reference.landmarks(sample, cell.num_features, keys)
    drawn = (cell.num_features, cell.head_dim, cell.heads, True, cell.seed, 0, 0, torch.device(cell.device))
    omega = directions(Draw(name, *drawn, torch.float64 if cell.dtype == "float64" else torch.float32))
    return attend, lambda sample: reference.features(sample, name, omega[sample.head], window)


def _sdpa(backend: str, cell: Cell) -> tuple[reference.Attend, reference.Formula]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPA[backend]):
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
    if cell.causal:
        hidden = torch.ones(cell.length, cell.length, dtype=torch.bool, device=cell.device).triu_(1)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class Model:
    """A whole model up to its last hidden state: a head over a vocabulary would take more time than the attention."""

    module: Any
    num_features: int
    seed: int

    @classmethod
    def build(cls, name: str, *, layers: int, longest: int, num_features: int, seed: int, dtype: torch.dtype) -> Model:
        """Makes a model of `MODELS` with random weights and `longest` positions; the seed also draws the weights."""
        sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": MODEL_HEADS, "max_position_embeddings": longest}
        module: Any
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if name == "bert":
                module = BertModel(BertConfig(**sizes, intermediate_size=3072), add_pooling_layer=False)
            else:
                sizes |= {"num_key_value_heads": MODEL_KEY_HEADS, "intermediate_size": 2048, "use_cache": False}
                module = LlamaModel(LlamaConfig(**sizes))
        return cls(module.eval().to(dtype), num_features, seed)

    def use(self, backend: str) -> None:
        """Switches to a backend; FAVOR runs at every length."""
        if backend == "sdpa":
            self.module.set_attn_implementation("sdpa")
        else:
            favor.configure(self.module, backend, exact_below=0, num_features=self.num_features, seed=self.seed)

    def inputs(self, batch_size: int, length: int) -> tuple[Tensor, Tensor]:
        """Draws tokens `[B, L]`, and a gradient of the last hidden state; a constant one would vanish in the norm."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(1000, self.module.config.vocab_size, (batch_size, length), generator=generator)
        slope = torch.randn(batch_size, length, HIDDEN, generator=generator)
        return tokens.to(self.module.device), slope.to(self.module.device, self.module.dtype)

    def run(self, tokens: Tensor, slope: Tensor | None) -> Tensor:
        """Computes the last hidden state `[B, L, 768]`; with its gradient `slope` also gradients of all weights."""
        self.module.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(slope is not None):
            hidden = self.module(input_ids=tokens).last_hidden_state
        if slope is not None:
            hidden.backward(slope)
        return hidden.detach()

    def problem(self, backend: str, tokens: Tensor, slope: Tensor | None) -> str | None:
        """Runs once and says what is wrong; None if nothing is.

        Wrong are: another backend, a result of FAVOR that equals that of SDPA, and numbers that are not finite. The
        cells of attention, not this function, check results against float64.
        """
        self.use(backend)
        implementation = self.module.config._attn_implementation
        if implementation != backend:
            return f"expected the backend {backend}, but the model is set to {implementation}"
        found = [self.run(tokens, slope), *(p.grad for p in self.module.parameters() if p.grad is not None)]
        if not all(bool(tensor.isfinite().all()) for tensor in found):
            return "the last hidden state or a gradient is not finite"
        if slope is not None and len(found) == 1:
            return "it gives no gradients"
        if backend != "sdpa":
            few = tokens[:, :128]
            estimate = self.run(few, None)
            self.use("sdpa")
            if torch.equal(estimate, self.run(few, None)):
                return "it gives exactly what sdpa gives, so that its features did not run"
        return None
