"""Batches made while a step runs: in a thread of their own, and on a GPU on a CUDA stream of their own.

So a step waits neither until its batch's kernels are launched nor for work that blocks the host. The thread has torch's
default settings: gradients on, no autocast, no inference mode. `make` must therefore give the same under any settings,
draw from no global generator, and change no flag that threads share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import TypeVar

import torch

from situs.data.batch import Batch

T = TypeVar("T")
_Ready = tuple[Batch, torch.cuda.Event | None]

DEPTH = 2
"""Batches prepared ahead of the step. One would do if all took the same time; each holds memory."""


def prefetch(make: Callable[[T], Batch], tasks: Iterable[T], device: torch.device) -> Iterator[Batch]:
    """`map(make, tasks)`, where `make` runs up to `DEPTH` batches ahead; `tasks` is read in the caller's thread.

    An error in either is raised in place of its batch, after the batches before it. Closed early, it drops what has not
    begun and waits for what has.
    """
    stream = _SideStream(device)
    pool = ThreadPoolExecutor(1, "situs-prefetch", initializer=stream.enter)

    def submitted() -> Iterator[Future[_Ready]]:
        try:
            for task in tasks:
                yield pool.submit(stream.run, make, task)
        except Exception as error:  # noqa: BLE001  (raised where its batch would be)
            failed: Future[_Ready] = Future()
            failed.set_exception(error)
            yield failed

    try:
        futures = submitted()
        waiting = deque(islice(futures, DEPTH))
        while waiting:
            batch, done = waiting.popleft().result()
            waiting.extend(islice(futures, 1))
            yield stream.hand_over(batch, done)
    finally:
        # The garbage collector may close this in the thread itself, which cannot wait for its own end.
        pool.shutdown(wait=threading.get_ident() != stream.thread, cancel_futures=True)


class Pace:
    """Keeps a caller from launching more than `DEPTH` steps ahead of the GPU, and tells whether the GPU still has work.

    Memory that moved between streams is free only when the GPU is done with it, not when the host is: a host that
    launches a hundred steps ahead, as recorded steps allow, would hold a hundred batches. On any other device, or with
    None, it limits nothing.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        self.steps: deque[torch.cuda.Event] = deque()

    def launched(self) -> None:
        """Called after a step was launched: waits for the one `DEPTH` before it."""
        if self.device is None:
            return
        self.steps.append(torch.cuda.Event(blocking=True))
        self.steps[-1].record(torch.cuda.current_stream(self.device))
        if len(self.steps) > DEPTH:
            self.steps.popleft().synchronize()

    @property
    def busy(self) -> bool:
        """Whether the last step still runs, so that nothing has waited for what came since."""
        return bool(self.steps) and not self.steps[-1].query()


class _SideStream:
    """The device and CUDA stream of the thread; the caller's stream waits for it batch by batch."""

    def __init__(self, device: torch.device) -> None:
        self.thread, self.stream = 0, None
        if device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self.stream = _stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # for the pipeline's own tensors

    def enter(self) -> None:
        """Runs first in the thread, which begins on device 0."""
        self.thread = threading.get_ident()
        if self.stream is not None:
            torch.cuda.set_device(self.device)

    def run(self, make: Callable[[T], Batch], task: T) -> _Ready:
        """In the thread: a batch, and the event that ends its kernels."""
        if self.stream is None:
            return make(task), None
        with torch.cuda.stream(self.stream):
            batch, done = make(task), torch.cuda.Event()
            done.record(self.stream)
        return batch, done

    def hand_over(self, batch: Batch, done: torch.cuda.Event | None) -> Batch:
        """In the caller's thread: its stream waits for the batch, and the batch's memory for its stream."""
        if done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(done)
            for tensor in (batch.inputs, batch.ids, batch.mask, *batch.targets.values()):
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(current)
        return batch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders, which share its memory. High priority: its kernels are small and a step is long."""
    return torch.cuda.Stream(device, priority=-1)
