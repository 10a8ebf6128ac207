"""MJP: masked jigsaw puzzle positions; the method, its config and its regression of places (DAL)."""

from situs.methods.mjp.config import VARIANTS, MJPConfig
from situs.methods.mjp.method import MJP

__all__ = ["MJP", "VARIANTS", "MJPConfig"]
