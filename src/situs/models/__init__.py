"""`open_model` opens any model: a run, an export, a locked folder with its key, a name with weights, a module."""

from situs.models.model import Model
from situs.models.open import PUBLISHED, RANDOM, open_model

__all__ = ["PUBLISHED", "RANDOM", "Model", "open_model"]
