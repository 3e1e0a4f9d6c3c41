"""Watches a model run: which attention calls the backend, and which attention never does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from favor.integrations import backend as backend_module

BACKEND = "favor#"


class Watch:
    """Counts calls of the backend while `watching`, and finds attention modules that make no call.

    Attributes:
        calls: number of calls of the attention function.
        local: number of calls whose mask or arguments say that the layer sees a window or a chunk only.
        estimated: number of calls that reached the estimator.
        exact: classes of modules with a call that was neither local nor estimated.
        silent: classes of attention modules that ran without any call.
    """

    def __init__(self) -> None:
        self.calls = self.local = self.estimated = 0
        self.exact: set[str] = set()
        self.silent: set[str] = set()
        self._stack: list[list[bool]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Replaces the attention function and the estimator by functions that count."""
        original, estimator = ALL_ATTENTION_FUNCTIONS[BACKEND], backend_module.favor_attention

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = self.estimated
            for flag in self._stack:
                flag[0] = True
            out = original(module, *args, **kwargs)
            self.calls += 1
            if self.estimated == before:
                mask = kwargs.get("attention_mask", args[3] if len(args) > 3 else None)
                sees = getattr(mask, "favor_visibility", None)
                is_local = sees is not None and (sees.reach is not None or sees.dense)
                self.local += (is_local := is_local or kwargs.get("sliding_window") is not None)
                self.exact |= set() if is_local else {type(module).__name__}
            return out

        def estimate(*args: Any, **kwargs: Any) -> Any:
            self.estimated += 1
            return estimator(*args, **kwargs)

        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        AttentionInterface.register(BACKEND, attention)
        backend_module.favor_attention = estimate
        try:
            yield self
        finally:
            AttentionInterface.register(BACKEND, original)
            backend_module.favor_attention = estimator
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _is_attention(module):
            self._stack.append([False])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not _is_attention(module) or self._stack.pop()[0]:
            return
        if not any(_is_attention(part) for part in module.modules() if part is not module):
            self.silent.add(type(module).__name__)


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__
