"""A part of a source, spread evenly over it: enough for a probe, and of every class where classes stand in a row."""

from __future__ import annotations

from torch import Tensor

from situs.data.base import Source


class Subset(Source):
    """At most `count` images of `source`, at equal distances."""

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source.name, source.classes, source.channels, source.strict)
        self.source = source
        self.count = min(count, len(source))

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[Tensor, int | None]:
        """Image and label `index` of the subset."""
        return self.source.read(index * len(self.source) // self.count)
