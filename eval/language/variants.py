"""The variants to compare: an attention backend, its options, and its cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel

import favor
from favor.config import FavorConfig, feature_family
from favor.train.common.program import did_you_mean

CACHES = ("auto", "dynamic", "state")
EXACT, SDPA = "exact", "sdpa"
# More keys than any text here has.
ALWAYS = 2**40


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Attributes:
        label: the text that the user wrote.
        backend: "exact", "sdpa" or a FAVOR backend. "exact" and "sdpa" are softmax attention; "exact" runs layers with
            a sliding window block by block, which gives the same numbers in linear time.
        options: all options of the backend, so that no option of another variant stays.
        cache: "dynamic" is transformers' `DynamicCache`, "state" is `favor.FavorCache`.
    """

    label: str
    backend: str
    options: Mapping[str, Any]
    cache: str

    @classmethod
    def parse(cls, text: str, cache: str = "auto") -> Variant:
        """Reads `BACKEND[:KEY=VALUE,...]`, such as `landmark:selected_keys=512,cache=dynamic`.

        Args:
            text: the variant; values are JSON or plain words; the key `cache` names its cache.
            cache: cache if the text names none. "auto" is "dynamic" for exact attention, else "state".

        Raises:
            ValueError: for an unknown backend, option or cache. TypeError: for an option of a wrong type.
        """
        backend, _, rest = text.partition(":")
        known = (EXACT, SDPA, *favor.BACKENDS)
        if backend not in known:
            near = did_you_mean(backend, known)
            raise ValueError(
                f"a backend must be one of {', '.join(known)}, with optional :KEY=VALUE,...; got {text!r}{near}"
            )
        pairs = [pair.partition("=") for pair in rest.split(",") if pair]
        if not all(sign and value for _, sign, value in pairs):
            raise ValueError(f"options must be written KEY=VALUE, with commas between them; got {text!r}")
        options = {key: _value(value) for key, _, value in pairs}
        cache = options.pop("cache", cache)
        if cache not in CACHES:
            raise ValueError(
                f"cache must be one of {', '.join(CACHES)}; got {cache!r}{did_you_mean(str(cache), CACHES)}"
            )
        exact = backend in (EXACT, SDPA)
        if exact and options:
            raise ValueError(f"{backend} takes no options, got {text!r}")
        if cache == "auto":
            cache = "dynamic" if exact else "state"
        config = FavorConfig.from_dict({"exact_below": ALWAYS if exact else 0, **options})
        if not exact:
            feature_family(backend, config, given=options)
        return cls(text, backend, config.to_dict(), cache)

    def apply(self, model: PreTrainedModel) -> None:
        """Switches the attention of a model; layers with a sliding window stay exact."""
        if self.backend == SDPA:
            model.set_attn_implementation(SDPA)
        else:
            favor.configure(model, "landmark" if self.backend == EXACT else self.backend, **self.options)

    def new_cache(self, model: PreTrainedModel) -> Cache:
        """Makes an empty cache for `model`."""
        if self.cache == "dynamic":
            return DynamicCache(config=model.config)
        return favor.FavorCache(model.config)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def variants(texts: Sequence[str], cache: str = "auto") -> list[Variant]:
    """Reads variants, exact attention first, each once."""
    found = [Variant.parse(text, cache) for text in dict.fromkeys(texts)]
    exact = [variant for variant in found if variant.backend in (EXACT, SDPA)] or [Variant.parse(EXACT)]
    return [*exact, *(variant for variant in found if variant not in exact)]
