"""favor: FAVOR+, FAVOR++ and FAVOR# linear attention for PyTorch and Hugging Face transformers.

`import favor` registers the backends, so that any transformers model takes them by name:

    model = AutoModel.from_pretrained(path, attn_implementation="favor#")
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

from favor import features, landmark, registry  # noqa: F401  landmark adds its family
from favor.attention import favor_attention
from favor.attention.parallel import sequence_parallel, shard, unshard
from favor.config import FavorConfig
from favor.integrations.adapt.calibrate import calibrate
from favor.integrations.adapt.convert import convert
from favor.integrations.backend import register, register_features
from favor.integrations.cache import FavorCache
from favor.integrations.configure import configure
from favor.integrations.describe import describe
from favor.integrations.layer import RedrawCounter

__version__ = version("favor")
__all__ = [
    "BACKENDS",
    "FavorCache",
    "FavorConfig",
    "RedrawCounter",
    "calibrate",
    "configure",
    "convert",
    "describe",
    "favor_attention",
    "features",
    "register_features",
    "registry",
    "sequence_parallel",
    "shard",
    "unshard",
]

register()
# The models of the zoo are known to transformers' Auto classes from here on. Nothing of them is used in this package.
import_module("favor.models")


def __getattr__(name: str) -> Any:
    if name == "BACKENDS":  # those registered by now
        return tuple(registry.BACKENDS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
