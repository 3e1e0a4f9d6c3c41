"""A family of features as a user would write one, in a file of their own: opposite pairs, exp(w.x) and exp(-w.x)."""

from contextlib import contextmanager
from unittest.mock import patch

import favor
from favor import registry
from favor.features import Moments, Parameters, PositiveFeatures


class OppositePairs(PositiveFeatures):
    """Positive features of FAVOR+ whose directions come in pairs w and -w: cosh(w.x), so to speak."""

    name = "opposite"
    antithetic = True
    needs_statistics = False

    def fit_moments(self, moments: Moments) -> Parameters:
        mean = moments.mean_x
        return Parameters.identity(mean.shape[-1], dtype=mean.dtype, device=mean.device)


class OppositeGERF(favor.features.GERF):
    """One with parameters from data, under a backend of its own name."""

    name = "opposite_gerf"
    backends = ("favor_pairs",)
    antithetic = True


@contextmanager
def registered(*families):
    """Registers families by the public call, and forgets them at the end."""
    backends = {name: dict(own) for name, own in registry.BACKENDS.items()}
    with patch.dict(registry.FAMILIES), patch.dict(registry.BACKENDS, backends, clear=True):
        for family in families:
            favor.register_features(family)
        yield
