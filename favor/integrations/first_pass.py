"""One line in the log at the first forward pass of a model: what its layers ran."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from favor.integrations.adapters import watch_adapters
from favor.integrations.layer import FirstPass

_logger = logging.getLogger("favor")
LINEAR = "linear: "  # begins the account of a layer that runs as asked


def note(first: FirstPass, layer: int, account: str, keys: int) -> None:
    """Records what a layer ran, and tells the log when all layers of the model have run, or one has run again.

    Args:
        first: of the model.
        layer: number of the layer.
        account: what it ran, such as "linear: landmark, M = 256, window 0".
        keys: number of keys.
    """
    thread = threading.get_ident()
    if layer not in first.seen:
        first.seen[layer], first.threads[layer], first.keys = account, thread, max(first.keys, keys)
        if not first.expected <= first.seen.keys():
            return
    elif first.threads[layer] != thread:
        return  # a replica of nn.DataParallel, in the same pass
    first.is_told = True
    watch_adapters()  # peft may have been imported after the model was built
    _tell(first)


def _tell(first: FirstPass) -> None:
    counts = Counter(first.seen.values())
    layers = "; ".join(f"{count} layer{'s' if count > 1 else ''} {account}" for account, count in counts.items())
    others = any(not account.startswith(LINEAR) for account in counts)
    # A layer without linear attention makes the line a warning, which the log shows by default.
    _logger.log(
        logging.WARNING if others else logging.INFO,
        "favor: first forward pass of %s, up to %d keys: %s. favor.describe(model, length) has the details.",
        first.model,
        first.keys,
        layers,
    )
