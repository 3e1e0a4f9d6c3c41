"""favor: FAVOR+, FAVOR++ and FAVOR# linear attention for PyTorch and Hugging Face transformers.

`import favor` registers the backends, so that any transformers model takes them by name:

    model = AutoModel.from_pretrained(path, attn_implementation="favor#")
"""

from importlib.metadata import version

from favor import features
from favor.attention import favor_attention
from favor.config import BACKENDS, FavorConfig
from favor.integrations.calibration import calibrate
from favor.integrations.convert import convert
from favor.integrations.generation import FavorCache
from favor.integrations.layers import RedrawCounter
from favor.integrations.transformers import configure, register

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
