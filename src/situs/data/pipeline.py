"""From a source to a batch, for one modality: read in a worker, random numbers for each sample, finished on the device.

A new modality is a `Source` whose `read` gives a sample's values, and a `Pipeline` with `collate` and `finish`;
`situs.data.loader.Loader` and the training loop know nothing else of it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from situs.data.augment.mix import soft_labels
from situs.data.batch import Batch
from situs.data.sampler import sample_of
from situs.data.sources.base import Source
from situs.data.sources.images import pop_transparency_flag
from situs.errors import BrokenSampleError, SitusError, none_read

Noise = dict[str, Tensor]


class WorkerBatch(NamedTuple):
    """A batch as a worker gives it. values: [b, …] by name. ids: [b] draw numbers; empty where no sample was readable.

    broken: (row, reason) for each broken sample. transparent: whether an image was laid over white. sizes: the rows of
    each step, where these are several steps.
    """

    values: dict[str, Tensor]
    ids: Tensor
    broken: list[tuple[int, str]]
    transparent: bool = False
    sizes: Sequence[int] = ()

    def part(self, span: slice) -> WorkerBatch:
        """The samples of a span; broken samples go with the first span."""
        values = {name: value[span] for name, value in self.values.items()}
        return WorkerBatch(values, self.ids[span], [] if span.start else self.broken, self.transparent)


class Pipeline(ABC):
    """Plain data, so that it can be sent to a worker process; `to` gives the loader's own copy, on its device.

    training: whether samples are augmented. stand_in: the next readable sample stands in for a broken one, under the
    broken one's draw, so that batches keep their size, as in training; otherwise it is left out. by_rows: whether
    `collate` gives a row of every value for each sample. row_bytes: about what a sample takes on its way from a worker;
    0: unknown. thread_safe: whether a thread may make its batches while a step runs (`situs.data.prefetch`).
    pairs: whether `finish` looks at two rows of a batch, (0, 1), (2, 3)…. in_memory: what a log says of samples that
    need no worker. resident: whether all samples are read once and kept on the device (`situs.data.loader`); for
    images the size they are kept at. device_tensors: its attributes that are moved to the device.
    """

    by_rows = thread_safe = True
    pairs = False
    row_bytes = 0
    in_memory = ""
    resident: Any = None
    device_tensors: ClassVar[tuple[str, ...]] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What a result must report of how samples were prepared, beyond what its model reports."""
        return {}

    def __init__(self, source: Source, *, training: bool) -> None:
        self.source, self.training, self.stand_in = source, training, training

    def read(self, epoch: int, draws: Sequence[int], done: Mapping[int, Sequence[int]] | None = None) -> WorkerBatch:
        """The samples of some draws. Randomness depends on (seed, epoch, draw) alone: workers change nothing.

        done: samples whose blocks may be released, by how many of the draws have been read by then; None where blocks
        are not released.
        """
        broken: list[tuple[int, str]] = []
        readable: list[int] = []
        samples: list[dict[str, Any]] = []
        for count in range(len(draws) + 1):
            if count and (sample := self._sample(epoch, draws[count - 1], broken, done is not None)) is not None:
                readable.append(draws[count - 1])
                samples.append(sample)
            for row in (done or {}).get(count, ()):
                self.source.release(row)
        if not samples:
            return WorkerBatch({}, torch.empty(0, dtype=torch.int64), broken)
        values = self.collate(epoch, readable, samples)
        return WorkerBatch(values, torch.tensor(readable), broken, pop_transparency_flag())

    def _sample(self, epoch: int, draw: int, broken: list[tuple[int, str]], blocks: bool) -> dict[str, Any] | None:
        row, count = sample_of(draw), len(self.source)
        fields: tuple[str, ...] = ()
        for offset in range(count if self.stand_in else 1):
            index = (row + offset) % count
            try:
                return self.fetch(index, epoch, draw)
            except BrokenSampleError as error:
                if self.source.strict:
                    raise
                broken.append((index, str(error)))
                fields = error.fields
            finally:
                if blocks and offset:
                    self._release_other(row, index)
        if self.stand_in:
            unreadable = none_read(self.source.name, count, self.source.things)
            raise SitusError(f"{unreadable}; {broken[-1][1]}", field=fields)
        return None

    def _release_other(self, row: int, index: int) -> None:
        """Releases the block that a stand-in came from, if it is not the row's own: nobody else would."""
        blocks = self.source.blocks()
        if blocks is not None and len({*np.searchsorted(blocks.ends, [row, index], "right").tolist()}) > 1:
            self.source.release(index)

    def fetch(self, index: int, epoch: int, draw: int) -> dict[str, Any]:  # noqa: ARG002
        """What `collate` gets of sample `index`; epoch, draw: for pipelines that read only what a view needs."""
        return self.source.read(index)

    def whole(self) -> dict[str, Tensor] | None:
        """What `collate` would give of all samples, where they are in memory in that form already."""
        return None

    def lengths(self) -> Tensor | None:
        """The length of each sample, [n], where batches of similar lengths are cheaper."""
        return None

    def check_model(self, words: int, name: str) -> None:  # noqa: B027  (of ids, which mean words)
        """Refuses ids beyond the vocabulary of the model `name`. words: its size."""

    @abstractmethod
    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The samples cut or padded to one size: [b, …] by name."""

    def join(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The values of one batch, whose rows several workers have read."""
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]

    def to(self, device: torch.device) -> Self:
        """A copy whose `device_tensors` are on the device."""
        moved = copy.copy(self)
        for name in self.device_tensors:
            value = getattr(self, name)
            setattr(moved, name, None if value is None else value.to(device))
        return moved

    def move(self, values: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """A worker's values on the device."""
        return {name: value.to(device, non_blocking=True) for name, value in values.items()}

    def compile(self) -> None:  # noqa: B027  (a modality that gains nothing leaves it)
        """Fuses `finish` by torch.compile, where that is faster."""

    def noise(self, ids: Tensor, epoch: int) -> Noise:  # noqa: ARG002  (used by those that augment)
        """The random numbers of each sample, [B, …] by name: pure functions of its id and the epoch."""
        return {}

    @abstractmethod
    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:
        """The batch that a method sees."""

    def labels(self, values: Mapping[str, Tensor], smoothing: float) -> dict[str, Tensor]:
        """The target "label" of a batch whose samples have one class each; empty without labels."""
        if "label" not in values or not smoothing:
            return {"label": values["label"]} if "label" in values else {}
        assert self.source.classes is not None, "labels come with classes"
        return {"label": soft_labels(values["label"], len(self.source.classes), smoothing)}

    def shown(self, inputs: Tensor) -> Tensor:
        """A model's inputs as pictures for people, [B, C, H, W] in [0, 1]."""
        raise NotImplementedError
