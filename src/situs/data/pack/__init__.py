"""Shards prepared before a run: `pack` shrinks the images of any source and writes them as parquet or WebDataset."""

from situs.data.pack.run import Packed, pack
from situs.data.pack.shards import PackConfig

__all__ = ["PackConfig", "Packed", "pack"]
