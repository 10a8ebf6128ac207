"""Batches made beside the steps: in a thread of their own, and on a GPU on a stream of their own.

There a step neither waits until its batch's kernels are launched nor for a decoder that the host must wait for. What a
thread has of its own is torch's as it comes: gradients on, no autocast, no inference mode. So `make` must give the same
whatever the caller's are, draw from no global generator, and change no flag that all threads share.
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
_Made = tuple[Batch, torch.cuda.Event | None]

AHEAD = 2
"""Batches that are made, or wait made, while a step runs. One would do if all took the same time; each holds memory."""


def ahead(make: Callable[[T], Batch], given: Iterable[T], device: torch.device) -> Iterator[Batch]:
    """`map(make, given)`, where `make` runs up to `AHEAD` batches before the caller; `given` in the caller's thread.

    An error, of either, is raised in place of its batch, after those before it. Closed halfway it drops what is not
    begun and waits for what is.
    """
    lane = _Lane(device)
    pool = ThreadPoolExecutor(1, "situs-ahead", initializer=lane.enter)
    try:
        coming = _submitted(pool, lane, make, given)
        waiting = deque(islice(coming, AHEAD))
        while waiting:
            made = waiting.popleft().result()
            waiting.extend(islice(coming, 1))
            yield lane.taken(*made)
    finally:
        # The garbage collector may close this in the thread itself, which cannot wait for its own end.
        pool.shutdown(wait=threading.get_ident() != lane.thread, cancel_futures=True)


def _submitted(
    pool: ThreadPoolExecutor, lane: _Lane, make: Callable[[T], Batch], given: Iterable[T]
) -> Iterator[Future[_Made]]:
    try:
        for each in given:
            yield pool.submit(lane.run, make, each)
    except Exception as error:  # noqa: BLE001  (raised where its batch would be)
        failed: Future[_Made] = Future()
        failed.set_exception(error)
        yield failed


class Pace:
    """Keeps a caller from launching more than `AHEAD` steps before the GPU, and knows whether that still has work.

    Memory that went from stream to stream is free only when the GPU is through with it, and not when the host is: one
    who launches a hundred steps ahead, as a recorded step lets him, would hold a hundred batches. device: None, or
    one that is no GPU, keeps nobody.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        self.steps: deque[torch.cuda.Event] = deque()

    def launched(self) -> None:
        """A step was: waits for the one `AHEAD` before it."""
        if self.device is None:
            return
        self.steps.append(torch.cuda.Event(blocking=True))
        self.steps[-1].record(torch.cuda.current_stream(self.device))
        if len(self.steps) > AHEAD:
            self.steps.popleft().synchronize()

    @property
    def busy(self) -> bool:
        """Whether the last step is not done yet, so that nothing has waited for what came since."""
        return bool(self.steps) and not self.steps[-1].query()


class _Lane:
    """Where a thread works: its device and its stream, which the caller's waits for batch by batch."""

    def __init__(self, device: torch.device) -> None:
        self.thread, self.stream = 0, None
        if device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self.stream = _stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # for what the pipeline itself holds

    def enter(self) -> None:
        """In the thread, which begins on device 0."""
        self.thread = threading.get_ident()
        if self.stream is not None:
            torch.cuda.set_device(self.device)

    def run(self, make: Callable[[T], Batch], each: T) -> _Made:
        """In the thread."""
        if self.stream is None:
            return make(each), None
        with torch.cuda.stream(self.stream):
            made, done = make(each), torch.cuda.Event()
            done.record(self.stream)
        return made, done

    def taken(self, batch: Batch, done: torch.cuda.Event | None) -> Batch:
        """In the caller's thread: his stream waits for the batch, and the batch's memory for his stream."""
        if done is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(done)
            for tensor in (batch.inputs, batch.ids, batch.mask, *batch.targets.values()):
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(here)
        return batch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders, who so share its memory. First in line: its kernels are small and a step is long."""
    return torch.cuda.Stream(device, priority=-1)
