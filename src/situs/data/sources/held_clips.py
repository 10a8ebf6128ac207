"""Clips decoded once and held in memory: decoding a second of Opus costs more than training a small model on it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from situs.data.sources.base import Source
from situs.data.sources.images import BrokenImageError

_FULL = 32768.0


class HeldClips(Source):
    """The clips of a source, [n, T] in 16 bits, 2 bytes a sample, and shared by the workers.

    A clip of a 16-bit file at its own rate is the same to the bit; any other is rounded to 16 bits, and samples beyond
    full scale are cut off. A broken clip stays broken, and says the same.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source.name, source.classes, source.channels, source.strict)
        self.source, self.notes = source, source.notes
        self._broken: dict[int, str] = {}
        self._labels: dict[int, int] = {}
        self._waves = torch.empty(0)
        count = len(source)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # libsndfile lets other threads run
            for index, sample in enumerate(pool.map(self._decoded, range(count))):
                if sample is None:
                    continue
                if not self._waves.numel():
                    self._waves = torch.zeros(count, len(sample["wave"]), dtype=torch.int16).share_memory_()
                self._waves[index] = sample["wave"]
                if "label" in sample:
                    self._labels[index] = sample["label"]

    def _decoded(self, index: int) -> dict[str, Any] | None:
        try:
            sample = self.source.read(index)
        except BrokenImageError as error:
            self._broken[index] = str(error)
            return None
        return sample | {"wave": (sample["wave"] * _FULL).round_().clamp_(-_FULL, _FULL - 1).to(torch.int16)}

    def __len__(self) -> int:
        return len(self.source)

    def key(self, index: int) -> str:
        """The clip's name in its source."""
        return self.source.key(index)

    def origin(self, index: int) -> tuple[Source, int]:
        """In the source."""
        return self.source.origin(index)

    def read(self, index: int) -> dict[str, Any]:
        """Clip `index`: "wave" [T] float32, and "label" where there is one."""
        if index in self._broken:
            raise BrokenImageError(self._broken[index])
        wave = self._waves[index].float().div_(_FULL)
        return {"wave": wave, "label": self._labels[index]} if index in self._labels else {"wave": wave}
