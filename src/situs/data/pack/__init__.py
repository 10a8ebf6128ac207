"""Shards made ahead of a run: `pack` shrinks the images of any source and writes them as parquet or WebDataset."""

from situs.data.pack.config import PackConfig
from situs.data.pack.run import Packed, pack

__all__ = ["PackConfig", "Packed", "pack"]
