"""The interfaces of the training loop: the loader it needs, the hooks it calls, the result it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from situs.methods.base import Batch, Method
from situs.train.step import Ema

if TYPE_CHECKING:
    from situs.data.loader import Loader


class TrainLoader(Protocol):
    """What the loop needs of a loader. Each rank has its own loader and gets its own part of every batch.

    steps_per_epoch: batches per epoch, the same on every rank. global_batch: samples per step over all ranks, by which
    the rate may be scaled. mark: identifies the samples and their order; a run is resumed only with the same.
    data_wait: seconds that the loop has waited for batches so far.
    """

    steps_per_epoch: int
    global_batch: int

    @property
    def mark(self) -> str: ...

    data_wait: float

    def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
        """The epoch's batches from number `start_step` on: augmented, on the device, the same every time.

        No rank's part is empty, and only an epoch's last batch may give the ranks parts of unequal size.
        """
        ...


@dataclass
class RunState:
    """What a hook sees after a step or an epoch. step: updates made. log: adds numbers to this step's log."""

    method: Method
    ema: Ema | None
    step: int
    epoch: int
    total: int
    steps_per_epoch: int
    log: Callable[[dict[str, float]], None]


@runtime_checkable
class StartHook(Protocol):
    """Does something before the first update of a new run, such as fitting its head."""

    def begin(self, method: Method) -> None:
        """Called with the weights that the run starts from, on every rank."""
        ...


@runtime_checkable
class Hook(Protocol):
    """Observes a run, such as a probe. It cannot change the run: torch's generators are restored after it.

    One that is a `StartHook` too is also called with the weights that a new run starts from.
    """

    def after_step(self, state: RunState) -> None:
        """Called after each update, on every rank."""
        ...

    def after_epoch(self, state: RunState) -> None:
        """Called after each whole epoch, on every rank."""
        ...


@runtime_checkable
class DataReader(Protocol):
    """A hook that reads samples of its own, such as a validation set."""

    loader: Loader


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. interrupted: it was asked to stop; before `total`, it can be resumed from `checkpoint`.

    skipped: samples that could not be read, in training and in what hooks look at.
    """

    step: int
    total: int
    interrupted: bool
    metrics: dict[str, float]
    checkpoint: Path | None
    skipped: int = 0
