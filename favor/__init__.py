"""favor: FAVOR+, FAVOR++ and FAVOR# linear attention for PyTorch and Hugging Face transformers.

`import favor` registers the backends, so that any transformers model takes them by name:

    model = AutoModel.from_pretrained(path, attn_implementation="favor#")
"""

from importlib.metadata import version

from favor import features
from favor.attention import favor_attention
from favor.config import BACKENDS, FavorConfig
from favor.integrations.adapt.calibrate import calibrate
from favor.integrations.adapt.convert import convert
from favor.integrations.backend import configure, register
from favor.integrations.cache import FavorCache
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
    "favor_attention",
    "features",
]

register()
