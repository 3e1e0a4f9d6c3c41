"""The content of the page as plain data: settings with errors, times and scores, and a verdict for each length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from favor.eval.approximation.report import Measured, spread
from favor.eval.approximation.variants import MEAN, Variant

# A smaller gain in speed may be noise.
FASTER = 1.1
SCORES = {"cosine": "cosine of the embeddings to the exact ones"}


@dataclass(frozen=True)
class Part:
    """Holds the measurements at one length.

    Attributes:
        measured: errors of the heads and scores of the whole model.
        seconds: seconds of a forward pass by variant; None is exact attention.
    """

    measured: Measured
    seconds: Mapping[Variant | None, float]


def content(parts: Sequence[Part], measure: str, layers: Sequence[str], max_error: float) -> dict[str, Any]:
    """Gives the data that the page shows.

    Args:
        parts: results of each length, ascending.
        measure: name of the score of the whole model, from `favor.eval.approximation.model.measure_of`.
        layers: names of the attention layers that were measured.
        max_error: greatest mean error of a setting that is recommended.

    Returns:
        Data for JSON; `settings` has one entry per variant and length, `lengths` one per length.
    """
    settings: list[dict[str, Any]] = []
    lengths: list[dict[str, Any]] = []
    for part in parts:
        own = [_setting(part, variant) for variant in part.measured.heads.variants if variant.is_backend]
        exact, uniform = part.seconds[None], part.measured.errors(Variant(MEAN, None, 0, 0))
        close = fastest(own, max_error)
        lengths.append(
            {
                "length": part.measured.length,
                "samples": part.measured.samples,
                "seconds": exact,
                "score": part.measured.exact,
                "uniform": uniform.tolist(),
                "verdict": verdict(part.measured.length, own, exact, max_error, measure),
                "fastest": None if close is None else len(settings) + own.index(close),
            }
        )
        settings += own
    name = SCORES.get(measure, measure)
    return {"measure": name, "layers": list(layers), "max_error": max_error, "lengths": lengths, "settings": settings}


def _setting(part: Part, variant: Variant) -> dict[str, Any]:
    """Makes one entry of `settings`; K is None for attention that selects no keys."""
    measured, more = part.measured, dict(variant.more)
    keys = more.pop("selected_keys", None)
    errors = measured.errors(variant)
    options = {"features": variant.features, "num_features": variant.num_features, "selected_keys": keys, **more}
    options |= {"window": variant.window, "exact_below": measured.length}
    given = {name: value for name, value in options.items() if value is not None}
    words = [f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in given.items()]
    return {
        "backend": replace(variant, more=tuple(more.items())).label,
        "M": variant.num_features,
        "K": keys,
        "window": variant.window,
        "length": measured.length,
        "errors": errors.tolist(),
        "error": float(errors.double().mean()),
        "p90": spread(errors)["p90"],
        "score": measured.scores[variant],
        "seconds": part.seconds[variant],
        "code": f'favor.configure(model, "{variant.backend}", {", ".join(words)})',
    }


def fastest(settings: Sequence[dict[str, Any]], max_error: float) -> dict[str, Any] | None:
    """Finds the fastest setting whose mean error is at most `max_error`; None if there is none."""
    close = [setting for setting in settings if setting["error"] <= max_error]
    return min(close, key=lambda setting: setting["seconds"], default=None)


def verdict(length: int, settings: Sequence[dict[str, Any]], exact: float, max_error: float, measure: str) -> str:
    """Says in one or two sentences whether to use linear attention at a length.

    Args:
        length: tokens.
        settings: those of this length.
        exact: seconds of exact attention.
        max_error: greatest mean error of a setting that is recommended.
        measure: name of the score of the whole model.
    """
    best, start = fastest(settings, max_error), f"At {length:,} tokens"
    if best is None:
        return f"{start} keep exact attention: no setting has a mean error of {max_error:g} or less."
    if exact < FASTER * best["seconds"]:
        return (
            f"{start} keep exact attention: {title(best)}, the fastest setting with a mean error of {max_error:g} or "
            f"less, takes {best['seconds'] / exact:.2f} x its time."
        )
    speed, score = exact / best["seconds"], SCORES.get(measure, measure)
    return (
        f"{start} use {title(best)}: {speed:.1f} x as fast as exact attention, with a mean error of "
        f"{best['error']:.2f} ({score} {best['score']:.3f})."
    )


def title(setting: Mapping[str, Any]) -> str:
    """Describes a setting in words, such as "landmark with M = 64, K = 256"."""
    words = [f"M = {setting['M']}"]
    if setting["K"] is not None:
        words.append(f"K = {setting['K']}")
    if setting["window"]:
        words.append(f"window {setting['window']}")
    return f"{setting['backend']} with {', '.join(words)}"
