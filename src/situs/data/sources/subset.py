"""Parts of a source: some of its rows, a random choice of so many, or a share that is held out by name."""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.data.sampler import epoch_order
from situs.data.sources.base import Blocks, Source
from situs.errors import BrokenSampleError, SitusError, verb


class _Parts(Source):
    """A source whose samples are others' samples: `at` says whose, and which."""

    def __init__(self, name: str, first: Source, notes: list[str]) -> None:
        super().__init__(name, first.classes, first.channels, first.strict, multi_label=first.multi_label)
        self.first, self.notes, self.things = first, notes, first.things

    @abstractmethod
    def at(self, index: int) -> tuple[Source, int]:
        """The source of sample `index`, and its number there."""

    @property
    def target(self) -> str:
        return self.first.target

    def key(self, index: int) -> str:
        source, row = self.at(index)
        return source.key(row)

    def read(self, index: int) -> dict[str, Any]:
        source, row = self.at(index)
        return source.read(row)

    def label(self, index: int) -> Any:
        source, row = self.at(index)
        return source.label(row)

    def origin(self, index: int) -> tuple[Source, int]:
        source, row = self.at(index)
        return source.origin(row)


class Rows(_Parts):
    """Some images of a source, by their numbers."""

    def __init__(self, source: Source, rows: Iterable[int], name: str | None = None) -> None:
        super().__init__(name or source.name, source, source.notes)
        self.source = source
        self.rows = np.fromiter(rows, np.int64) if not isinstance(rows, np.ndarray) else rows

    def seen(self) -> Sequence[str]:
        return self.source.seen()

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, index: int) -> tuple[Source, int]:
        return self.source, int(self.rows[index])

    def blocks(self) -> Blocks | None:
        """Those of the source that hold a row; none where the rows are not in the source's order."""
        whole = self.source.blocks()
        if whole is None or (np.diff(self.rows) <= 0).any():
            return None
        ends = np.unique(np.searchsorted(self.rows, whole.ends))
        ends = ends[ends > 0]
        return whole._replace(ends=ends, bytes=whole.bytes * len(ends) // len(whole.ends))

    def release(self, index: int | None = None) -> None:
        self.source.release(None if index is None else int(self.rows[index]))


class Joined(_Parts):
    """Several sources as one, one after another. parts: each behind what stands before the names of its samples."""

    def __init__(self, name: str, parts: Iterable[tuple[str, Source]]) -> None:
        self.prefixes, self.parts = zip(*parts, strict=True)
        first = self.parts[0]
        if any((part.classes, part.target) != (first.classes, first.target) for part in self.parts):
            raise SitusError(f"{name}: its splits have different classes; take one of them", field="split")
        super().__init__(name, first, [note for part in self.parts for note in part.notes])
        self.ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def at(self, index: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self.ends, index, "right"))
        return self.parts[part], index - int(self.ends[part - 1]) * (part > 0)

    def key(self, index: int) -> str:
        """The sample's name in its part, seen from where the parts lie."""
        return self.prefixes[int(np.searchsorted(self.ends, index, "right"))] + super().key(index)


class Subset(Rows):
    """At most `count` images of `source`: a uniform random choice, the same every time, in the source's order.

    Equal distances would be simpler, and wrong for a set whose classes take turns.
    """

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source, epoch_order(0, 0, len(source))[:count].sort().values.numpy())


class PerClass(Rows):
    """At most `count` samples of each class of `source`: a random choice, the same every time, in the source's order.

    Of two counts the smaller choice is a part of the larger one. A sample whose label cannot be read is left out.
    """

    def __init__(self, source: Source, count: int) -> None:
        left, rows = [count] * len(check_one_class(source, "per_class")), []
        for row in epoch_order(0, 0, len(source)).tolist():
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


def check_one_class(source: Source, field: str) -> tuple[str, ...]:
    """The classes of a set with one a sample; others are refused, for what counts classes."""
    if source.classes is None or source.target != "label":
        several = {"labels": "any number of classes a sample", "mask": "a class for each pixel"}
        several["objects"] = "a class for each object"
        has = several[source.target] if source.classes is not None else "no labels"
        asked = "so many of each class were" if field == "per_class" else "every class equally often was"
        raise SitusError(f"{source.name}: has {has}, and {asked} asked for", field=field)
    return source.classes


def class_labels(source: Source) -> Tensor:
    """The class of each sample of a set with one a sample, [n] int64; -1 where it cannot be read."""
    labels = torch.full((len(source),), -1)
    for index in range(len(source)):
        with contextlib.suppress(BrokenSampleError):
            labels[index] = int(source.label(index))
    return labels


def hold_out(source: Source, share: float, *, held: bool) -> Rows:
    """About a `share` of the images that is held out of `source` (held), or the others.

    Each image's own name decides, by a hash, so that an image stays on its side when others come or go. Of sets with a
    class a sample, up to `STRATIFIED` samples, every class of two or more has at least one on each side: the one with
    the smallest hash is held out, or the one with the largest is not. A class of one is trained on, and a note says so.
    """
    bound = int(share * 2**64)
    hashes = np.fromiter((_hash(source.key(index)) for index in range(len(source))), np.uint64)
    out = hashes < np.uint64(bound)
    labelled, alone = source.classes is not None and source.target == "label", 0
    if labelled and source.things != "sentences" and len(source) <= STRATIFIED:  # equal sentences stay on one side
        alone = _on_both_sides(source, hashes, out)
    rows = np.flatnonzero(out == held)
    if not len(rows) and alone == len(source):
        said = f"{source.name}: has one {source.things.removesuffix('s')} of each class, and none can be held out"
        raise SitusError(f"{said}; held_out=0 trains on all of them", field="held_out")
    if not len(rows):
        rest = "none is held out" if held else "every one is held out"
        raise SitusError(
            f"held_out={share:g}: of the {len(source)} {source.things} of {source.name} {rest}; choose another share",
            field="held_out",
        )
    said = f"the {share:.3g} held out" if held else f"without the {share:.3g} held out"
    return Rows(source, rows, f"{source.name}, {said}")


HELD_OUT = 0.2
"""Share that is held out where nothing is said, of data that has no split to be judged on."""

STRATIFIED = 100_000
"""Samples up to which a held-out share has some of every class; in larger sets names alone decide."""


def _on_both_sides(source: Source, hashes: np.ndarray, out: np.ndarray) -> int:
    """Changes `out` [n] bool, the samples held out, so that each class of two or more samples is on both sides; gives
    how many classes have one sample only."""
    assert source.classes is not None
    members: list[list[int]] = [[] for _ in source.classes]
    for index, label in enumerate(class_labels(source).tolist()):
        if label >= 0:
            members[label].append(index)
    for rows in filter(None, members):
        if len(rows) == 1:
            out[rows] = False
        elif not out[rows].any():
            out[min(rows, key=hashes.__getitem__)] = True
        elif out[rows].all():
            out[max(rows, key=hashes.__getitem__)] = False
    alone = [name for name, rows in zip(source.classes, members, strict=True) if len(rows) == 1]
    if alone:
        few = ", ".join(map(repr, alone[:3])) + (", …" if len(alone) > 3 else "")
        are, one = verb(len(alone), "have"), source.things.removesuffix("s")
        source.notes.append(
            f"{source.name}: {len(alone):,} of its {len(source.classes):,} classes {are} one {one} only ({few}), which "
            "is trained on: too small to be tested"
        )
    return len(alone)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
