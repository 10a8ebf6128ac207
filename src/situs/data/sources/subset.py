"""Parts of a source: some of its rows, a random choice of so many, or a share that is held out by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from situs.data.sampler import exact_order
from situs.data.sources.base import Blocks, Source
from situs.errors import BrokenSampleError, SitusError


class Rows(Source):
    """Some images of a source, by their numbers."""

    def __init__(self, source: Source, rows: Iterable[int], name: str | None = None) -> None:
        told = (name or source.name, source.classes, source.channels, source.strict)
        super().__init__(*told, multi_label=source.multi_label)
        self.source = source
        self.rows = np.fromiter(rows, np.int64) if not isinstance(rows, np.ndarray) else rows
        self.notes, self.things = source.notes, source.things

    @property
    def target(self) -> str:
        """Of the source."""
        return self.source.target

    def __len__(self) -> int:
        return len(self.rows)

    def key(self, index: int) -> str:
        """The image's name in its source."""
        return self.source.key(int(self.rows[index]))

    def read(self, index: int) -> dict[str, Any]:
        """Sample `index` of the part."""
        return self.source.read(int(self.rows[index]))

    def label(self, index: int) -> Any:
        """Of the source."""
        return self.source.label(int(self.rows[index]))

    def origin(self, index: int) -> tuple[Source, int]:
        """In the source."""
        return self.source.origin(int(self.rows[index]))

    def blocks(self) -> Blocks | None:
        """Those of the source that hold a row; none where the rows are not in the source's order."""
        whole = self.source.blocks()
        if whole is None or (np.diff(self.rows) <= 0).any():
            return None
        ends = np.unique(np.searchsorted(self.rows, whole.ends))
        ends = ends[ends > 0]
        return whole._replace(ends=ends, bytes=whole.bytes * len(ends) // len(whole.ends))

    def release(self, index: int | None = None) -> None:
        """Of the source."""
        self.source.release(None if index is None else int(self.rows[index]))


class Subset(Rows):
    """At most `count` images of `source`: a uniform random choice, the same every time, in the source's order.

    Equal distances would be simpler, and wrong for a set whose classes take turns.
    """

    def __init__(self, source: Source, count: int) -> None:
        first = torch.arange(min(count, len(source)))
        super().__init__(source, exact_order(0, 0, len(source), "cpu")[first].sort().values.numpy())


class PerClass(Rows):
    """At most `count` samples of each class of `source`: a random choice, the same every time, in the source's order.

    Of two counts the smaller choice is a part of the larger one. A sample whose label cannot be read is left out.
    """

    def __init__(self, source: Source, count: int) -> None:
        if source.classes is None or source.target != "label":
            several = {"labels": "any number of classes a sample", "mask": "a class for each pixel"}
            several["objects"] = "a class for each object"
            said = several[source.target] if source.classes is not None else "no labels"
            raise SitusError(f"{source.name}: has {said}, and so many of each class were asked for", field="per_class")
        left, rows = [count] * len(source.classes), []
        for row in exact_order(0, 0, len(source), "cpu")[torch.arange(len(source))].tolist():
            try:
                label = int(source.label(row))
            except BrokenSampleError:
                continue
            if left[label]:
                left[label] -= 1
                rows.append(row)
            if not any(left):
                break
        super().__init__(source, sorted(rows))


def hold_out(source: Source, share: float, *, held: bool) -> Rows:
    """About a `share` of the images that is held out of `source` (held), or the others.

    Each image's own name decides, by a hash, so that an image stays on its side when others come or go.
    """
    bound = int(share * 2**64)
    rows = np.fromiter((index for index in range(len(source)) if (_hash(source.key(index)) < bound) is held), np.int64)
    if not len(rows):
        rest = "none is held out" if held else "every one is held out"
        raise SitusError(
            f"held_out={share:g}: of the {len(source)} {source.things} of {source.name} {rest}; choose another share",
            field="held_out",
        )
    said = f"the {share:.3g} held out" if held else f"without the {share:.3g} held out"
    return Rows(source, rows, f"{source.name}, {said}")


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
