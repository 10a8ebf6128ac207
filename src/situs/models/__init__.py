"""One way to every model: a run, an export, a locked folder with its key, weights, a name, a folder, an own module."""

from situs.models.model import Model
from situs.models.open import PUBLISHED, RANDOM, open_model

__all__ = ["PUBLISHED", "RANDOM", "Model", "open_model"]
