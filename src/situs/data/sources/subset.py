"""Parts of a source: some of its rows, a random choice, or a share that is held out by name."""

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
from situs.data.sources.labels import singleton_classes
from situs.errors import BrokenSampleError, SitusError, counted


class _View(Source):
    """A source whose samples are those of other sources, found by `locate`."""

    def __init__(self, name: str, first: Source, notes: list[str]) -> None:
        super().__init__(name, first.classes, first.channels, first.strict, multi_label=first.multi_label)
        self.first, self.notes, self.things = first, notes, first.things

    @abstractmethod
    def locate(self, index: int) -> tuple[Source, int]:
        """The source of sample `index`, and its number there."""

    @property
    def target(self) -> str:
        return self.first.target

    def key(self, index: int) -> str:
        source, row = self.locate(index)
        return source.key(row)

    def read(self, index: int) -> dict[str, Any]:
        source, row = self.locate(index)
        return source.read(row)

    def label(self, index: int) -> Any:
        source, row = self.locate(index)
        return source.label(row)

    def origin(self, index: int) -> tuple[Source, int]:
        source, row = self.locate(index)
        return source.origin(row)


class Rows(_View):
    """Some samples of a source, by their numbers."""

    def __init__(self, source: Source, rows: Iterable[int], name: str | None = None) -> None:
        super().__init__(name or source.name, source, source.notes)
        self.source = source
        self.rows = np.fromiter(rows, np.int64) if not isinstance(rows, np.ndarray) else rows

    def classes_present(self) -> Sequence[str]:
        return self.source.classes_present()

    def __len__(self) -> int:
        return len(self.rows)

    def locate(self, index: int) -> tuple[Source, int]:
        return self.source, int(self.rows[index])

    def blocks(self) -> Blocks | None:
        """The source's blocks that hold one of the rows; None where the rows are not in the source's order."""
        whole = self.source.blocks()
        if whole is None or (np.diff(self.rows) <= 0).any():
            return None
        ends = np.unique(np.searchsorted(self.rows, whole.ends))
        ends = ends[ends > 0]
        return whole._replace(ends=ends, bytes=whole.bytes * len(ends) // len(whole.ends))

    def release(self, index: int | None = None) -> None:
        self.source.release(None if index is None else int(self.rows[index]))


class Joined(_View):
    """Several sources as one, one after another. parts: each with a prefix for the names of its samples."""

    def __init__(self, name: str, parts: Iterable[tuple[str, Source]]) -> None:
        self.prefixes, self.parts = zip(*parts, strict=True)
        first = self.parts[0]
        if any((part.classes, part.target) != (first.classes, first.target) for part in self.parts):
            raise SitusError(f"{name}: its splits have different classes; choose one split", field="split")
        super().__init__(name, first, [note for part in self.parts for note in part.notes])
        self.ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, index: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self.ends, index, "right"))
        return self.parts[part], index - int(self.ends[part - 1]) * (part > 0)

    def key(self, index: int) -> str:
        """The sample's name, with the prefix of its part."""
        return self.prefixes[int(np.searchsorted(self.ends, index, "right"))] + super().key(index)


class Subset(Rows):
    """At most `count` samples of `source`: a uniform random choice, the same every time, in the source's order.

    Every k-th sample would be simpler, but biased where the classes alternate.
    """

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source, epoch_order(0, 0, len(source))[:count].sort().values.numpy())


class PerClass(Rows):
    """At most `count` samples of each class of `source`: a random choice, the same every time, in the source's order.

    A smaller count gives a subset of a larger one. A sample whose label cannot be read is left out.
    """

    def __init__(self, source: Source, count: int) -> None:
        missing, rows = [count] * len(check_one_class(source, "per_class")), []
        for row in epoch_order(0, 0, len(source)).tolist():
            try:
                label = int(source.label(row))
            except BrokenSampleError:
                continue
            if missing[label]:
                missing[label] -= 1
                rows.append(row)
            if not any(missing):
                break
        super().__init__(source, sorted(rows))


def check_one_class(source: Source, field: str) -> tuple[str, ...]:
    """The classes of a single-label set; any other is refused. field: what needs them."""
    if source.classes is None or source.target != "label":
        labels = {"labels": "several classes per sample", "mask": "a class for each pixel"}
        labels["objects"] = "a class for each object"
        has = labels[source.target] if source.classes is not None else "no labels"
        raise SitusError(f"{source.name}: has {has}; {field} applies only to single-label classification", field=field)
    return source.classes


def class_labels(source: Source) -> Tensor:
    """The class of each sample of a single-label set, [n] int64; -1 where it cannot be read."""
    labels = torch.full((len(source),), -1)
    for index in range(len(source)):
        with contextlib.suppress(BrokenSampleError):
            labels[index] = int(source.label(index))
    return labels


def hold_out(source: Source, share: float, *, test_side: bool) -> Rows:
    """About a `share` of the samples, which is held out of `source` (test_side), or the others.

    A hash of each sample's name decides, so that a sample stays on its side when others are added or removed. In
    single-label sets of up to `STRATIFIED` samples every class of two or more has at least one sample on each side: the
    one with the smallest hash is held out, or the one with the largest is not. A class of one is trained on, and a note
    says so.
    """
    bound = int(share * 2**64)
    hashes = np.fromiter((_hash(source.key(index)) for index in range(len(source))), np.uint64)
    held_out = hashes < np.uint64(bound)
    labelled, single = source.classes is not None and source.target == "label", 0
    if labelled and source.things != "sentences" and len(source) <= STRATIFIED:  # equal sentences stay on one side
        single = _stratify(source, hashes, held_out)
    rows = np.flatnonzero(held_out == test_side)
    if not len(rows) and single == len(source):
        raise SitusError(
            f"{source.name}: each class has only one {source.things.removesuffix('s')}, so no "
            f"{source.things.removesuffix('s')} can be held out; held_out=0 trains on all {source.things}",
            field="held_out",
        )
    if not len(rows):
        nothing = "no sample is held out" if test_side else "every sample is held out"
        raise SitusError(
            f"held_out={share:g}: {nothing} ({counted(len(source), source.things)} of {source.name}); "
            "choose another fraction",
            field="held_out",
        )
    side = f"held-out fraction {share:.3g}" if test_side else f"without the held-out fraction {share:.3g}"
    return Rows(source, rows, f"{source.name}, {side}")


HELD_OUT = 0.2
"""Default share to hold out of data that has no split for evaluation."""

STRATIFIED = 100_000
"""Samples up to which a held-out share has some of every class; in larger sets names alone decide."""


def _stratify(source: Source, hashes: np.ndarray, held_out: np.ndarray) -> int:
    """Changes `held_out` [n] bool so that each class of two or more samples is on both sides; gives how many classes
    have one sample only."""
    assert source.classes is not None
    members: list[list[int]] = [[] for _ in source.classes]
    for index, label in enumerate(class_labels(source).tolist()):
        if label >= 0:
            members[label].append(index)
    for rows in filter(None, members):
        if len(rows) == 1:
            held_out[rows] = False
        elif not held_out[rows].any():
            held_out[min(rows, key=hashes.__getitem__)] = True
        elif held_out[rows].all():
            held_out[max(rows, key=hashes.__getitem__)] = False
    single, sentence = singleton_classes(source.classes, [*map(len, members)], source.things)
    if single:
        source.notes.append(f"{source.name}: {sentence}; the only sample of a class stays in training")
    return single


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
