"""A part of a source, drawn once and for all: enough for a probe, and of every class whatever order they stand in."""

from __future__ import annotations

from torch import Tensor

from situs.data.base import Source
from situs.data.sampler import epoch_order


class Subset(Source):
    """At most `count` images of `source`: a uniform random choice, the same every time, in the source's order.

    Equal distances would be simpler, and wrong for a set whose classes take turns.
    """

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source.name, source.classes, source.channels, source.strict)
        self.source = source
        chosen = epoch_order(0, 0, len(source))[:count]
        self.rows: list[int] = chosen.sort().values.tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> tuple[Tensor, int | None]:
        """Image and label `index` of the subset."""
        return self.source.read(self.rows[index])
