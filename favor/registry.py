"""The table of families: ways to compute attention in linear time, by name, and what each is able to do.

A family is a class. It joins the table by `@register` in its own file, and all code that needs a fact about it
(options, backends, calibration, programs) asks the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar


class Family:
    """Says by class attributes what a way to compute attention is able to do.

    Attributes:
        name: in the table; what `features=` takes.
        backends: values of `attn_implementation` that run it, the usual spelling first. Families may share a backend,
            which then chooses by the option `features`. Not inherited; by default `favor_` and the name.
        is_default: whether a shared backend runs this family where `features` is not set. Not inherited.
        factorizations: how it factors matrices of statistics, best first; empty if it factors none.
        needs_statistics: whether its parameters come from statistics of queries and keys.
        takes_parameters: whether its parameters can be given, stored and corrected, and its features have weights.
        learns_matrices: whether `favor.calibrate(..., feature_weights=True)` changes its parameters by gradient steps.
        supports_window: whether it estimates exp(x . y) itself, and can share a normaliser with exact blocks of tokens.
        supports_state: whether causal attention can go on from a state of earlier tokens.
        counts_features: whether the option `num_features` chooses how many features or means it has.
        operations: of a forward pass per token, feature (or mean) and number of a head.
        is_drawn: whether it has random directions, which depend on a seed.
        has_kernel: whether Triton kernels compute it.
        selects_keys: whether queries can attend exactly to keys that matter to them.
        default_selected: how many keys it selects by default, (bidirectional, causal).
        pooled_options: keyword arguments of the class when statistics of some texts are used for other texts.
        crossover: number of keys per feature from which on forward and backward pass together take less time than the
            fastest exact attention, (bidirectional, causal), by kind of device. head_dim 64: on a CPU in float32,
            on an H200 in bfloat16 with 64 heads (eval/results/speed, "Crossover").
        crossover_keys: the crossover in keys, where speed does not follow the number of features; else empty.
        windowed: factor of the crossover with a window in bidirectional layers (from the same page).
    """

    name: str
    backends: tuple[str, ...] = ()
    is_default: bool = False
    factorizations: tuple[str, ...] = ()
    needs_statistics: bool = False
    takes_parameters: bool = False
    learns_matrices: bool = False
    supports_window: bool = False
    supports_state: bool = False
    counts_features: bool = True
    operations: int = 8
    is_drawn: bool = True
    has_kernel: bool = False
    selects_keys: bool = False
    default_selected: tuple[int, int] = (0, 0)
    pooled_options: dict[str, Any] = {}  # noqa: RUF012
    crossover: dict[str, tuple[int, int]] = {"cpu": (4, 12), "cuda": (18, 32)}  # noqa: RUF012
    crossover_keys: dict[str, tuple[int, int]] = {}  # noqa: RUF012
    windowed: dict[str, int] = {"cpu": 2, "cuda": 3}  # noqa: RUF012


AnyFamily = TypeVar("AnyFamily", bound=type[Family])
FAMILIES: dict[str, type[Family]] = {}
BACKENDS: dict[str, dict[str, type[Family]]] = {}


def register(family: AnyFamily) -> AnyFamily:
    """Adds a family to the table; as a decorator of its class.

    Args:
        family: a subclass of `Family`, such as one of `favor.features.PositiveFeatures`, with a `name` of its own.

    Returns:
        The class.

    Raises:
        TypeError: if it is not such a class. ValueError: if another family has the name.
    """
    if not (isinstance(family, type) and issubclass(family, Family) and isinstance(getattr(family, "name", None), str)):
        raise TypeError(f"a family must be a class with a name, derived from favor.registry.Family, got {family!r}.")
    known = FAMILIES.get(family.name)
    if known is not None and (known.__module__, known.__qualname__) != (family.__module__, family.__qualname__):
        raise ValueError(f"the name {family.name!r} belongs to {known.__name__}; give {family.__name__} another name.")
    FAMILIES[family.name] = family
    for backend in backends_of(family):
        BACKENDS.setdefault(backend, {})[family.name] = family
    return family


def backends_of(family: type[Family]) -> tuple[str, ...]:
    """Gives the backends that run a family, see `Family.backends`."""
    return vars(family).get("backends") or (f"favor_{family.name}",)


def get(name: str, **options: Any) -> Any:
    """Makes a family by its name in the table.

    Args:
        name: "trig", "pos", "gerf", "saderf", "aderf", "sderf", "cderf", "wderf", "relu", "elu", "landmark", or one
            that was registered; or a backend, which stands for the family that it runs by default.
        **options: keyword arguments of the class, such as `alpha`.

    Returns:
        An instance of the class.

    Raises:
        ValueError: if the name is unknown; the message lists the known ones.

    Example:
        >>> import favor
        >>> favor.registry.get("sderf").name
        'sderf'
        >>> favor.registry.get("favor++").name
        'gerf'
    """
    if name not in FAMILIES and name in BACKENDS:
        name = family_of(name, None).name
    if name not in FAMILIES:
        hint = did_you_mean(name, [*FAMILIES, *BACKENDS])
        known = f"{', '.join(sorted(FAMILIES))}, or a backend ({', '.join(BACKENDS)})"
        raise ValueError(f"features must be one of {known}; got {name!r}.{hint}")
    return FAMILIES[name](**options)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Makes a question with the nearest known name, to append to an error; empty if none is near."""
    near = get_close_matches(str(name).lower(), map(str, known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def family_of(backend: str, features: str | None) -> type[Family]:
    """Gives the family that a backend runs.

    Args:
        backend: a value of `attn_implementation`.
        features: the option; read by backends that several families share.

    Raises:
        ValueError: if the backend does not run this family; the message lists those it runs.
    """
    families = BACKENDS[backend]
    if len(families) == 1:
        return next(iter(families.values()))
    if features is None:
        return min(families.values(), key=_is_no_default)
    if features not in families:
        hint = did_you_mean(features, families)
        raise ValueError(f"features of {backend} must be one of {', '.join(families)}; got {features!r}.{hint}")
    return families[features]


def selectable() -> tuple[str, ...]:
    """Names what the option `features` may be: families that share a backend with others, the default one first."""
    shared = {name: family for families in BACKENDS.values() if len(families) > 1 for name, family in families.items()}
    return tuple(sorted(shared, key=lambda name: _is_no_default(shared[name])))


def _is_no_default(family: type[Family]) -> bool:
    return not vars(family).get("is_default", False)  # not inherited by subclasses
