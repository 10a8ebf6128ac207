"""The same batches in the same order, made by a thread: on the CPU by its laws, on a GPU bit for bit."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from recipes import recipe

from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.prefetch import DEPTH, Pace, prefetch
from situs.data.sources.base import TensorSource
from situs.errors import SitusError

CPU = torch.device("cpu")
IMAGES = torch.randint(0, 256, (50, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
CONFIG = DataConfig(img_size=16, batch=12, workers=0, seed=9, resident="never")


def batch_of(number):
    return Batch(torch.tensor([number]), torch.tensor([number]))


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("situs-prefetch")]


def test_the_order_stays_and_nobody_runs_further_ahead_than_said():
    asked, made, received, apart = [], [], [], []

    def tasks():
        for number in range(9):
            apart.append(threading.current_thread() is threading.main_thread())
            asked.append(number)
            yield number

    def make(number):
        apart.append(threading.current_thread() is not threading.main_thread())
        made.append(number)
        return batch_of(number)

    for batch in prefetch(make, tasks(), CPU):
        received.append(int(batch.ids))
        deadline = time.monotonic() + 5
        while len(made) < (most := min(9, len(received) + DEPTH)) and time.monotonic() < deadline:
            time.sleep(1e-4)
        assert len(made) == len(asked) == most
    assert received == made == list(range(9)) and all(apart) and not threads()
    assert list(prefetch(make, [], CPU)) == []


@pytest.mark.parametrize("where", ["make", "tasks"])
def test_an_error_comes_as_itself_in_place_of_its_batch(where):
    error, found = SitusError("the fifth"), []

    def fails(number):
        if number == 4:
            raise error
        return number

    batches = (
        prefetch(lambda number: batch_of(fails(number)), range(9), CPU)
        if where == "make"
        else prefetch(batch_of, map(fails, range(9)), CPU)
    )
    with pytest.raises(SitusError) as told:
        deque(found.append(int(batch.ids)) for batch in batches)
    assert told.value is error and found == [0, 1, 2, 3] and not threads()


def test_closed_halfway_no_thread_is_left_and_nothing_more_is_begun():
    begun, under_way, go = [], threading.Event(), threading.Event()

    def make(number):
        begun.append(number)
        if number:
            under_way.set()
            go.wait(5)
        return batch_of(number)

    batches = prefetch(make, iter(range(9)), CPU)
    assert int(next(batches).ids) == 0 and len(threads()) == 1
    assert under_way.wait(5)
    threading.Timer(0.05, go.set).start()
    batches.close()  # waits for what is under way
    assert go.is_set() and begun == [0, 1] and not threads()


def loader(device="cpu", augment="cifar-deit", **changes):
    source = TensorSource(IMAGES, torch.arange(50) % 5, tuple("abcde"), "small")
    made = make_loader(replace(CONFIG, **changes), recipe(augment) if augment else None, device, source=source)
    assert made.prefetches == (device == "cuda")
    return made


def same(a, b):
    assert a.targets.keys() == b.targets.keys() and not b.inputs.requires_grad
    return all(
        torch.equal(x, y)
        for x, y in zip([a.inputs, a.ids, *a.targets.values()], [b.inputs, b.ids, *b.targets.values()], strict=True)
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augment", ["cifar-deit", None])
def test_a_loader_s_batches_are_the_same(workers, augment):
    plain, threaded = loader(augment=augment), loader(augment=augment, workers=workers)
    threaded.prefetches, state = True, torch.random.get_rng_state()
    for epoch, start in ((0, 0), (1, 0), (3, 2)):
        wanted = list(plain.iterate(epoch, start))
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            got = list(threaded.iterate(epoch, start))
        assert len(got) == plain.steps_per_epoch - start and all(map(same, wanted, got))
    next(threaded.iterate(1, 1))  # left halfway, and begun anew
    again = next(threaded.iterate(1, 1))
    assert same(next(plain.iterate(1, 1)), again) and not threads()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_made_beside_a_step_is_not_waited_for(monkeypatch):
    waited = []
    for thread in (False, True):
        slow = loader(augment=None)
        slow.prefetches, finish = thread, slow.pipeline.finish
        monkeypatch.setattr(slow.pipeline, "finish", lambda *given, do=finish: (time.sleep(0.02), do(*given))[1])
        batches = slow.iterate(0)
        next(batches)
        before = slow.data_wait
        for _ in batches:
            time.sleep(0.04)
        waited.append(slow.data_wait - before)
    assert waited[0] > 4 * 0.02 and waited[1] < waited[0] / 2


class Event:
    """A step of a GPU that is not here."""

    def __init__(self, blocking):
        assert blocking
        self.done, self.waited = False, False
        EVENTS.append(self)

    def record(self, stream):
        assert stream == "stream"

    def query(self):
        return self.done

    def synchronize(self):
        self.waited = self.done = True


EVENTS: list[Event] = []


def test_the_host_stays_two_steps_ahead_and_only_an_idle_gpu_waits(monkeypatch):
    EVENTS.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    pace = Pace(torch.device("cuda"))
    assert not pace.busy
    for _ in range(4):
        pace.launched()
    assert [event.waited for event in EVENTS] == [True, True, False, False]
    assert pace.busy
    EVENTS[-1].done = True
    assert not pace.busy
    nobody = Pace(CPU)
    nobody.launched()
    assert not nobody.busy and len(EVENTS) == 4


@pytest.mark.parametrize(("named", "meant"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cuda:0", "cuda:0")])
def test_a_gpu_without_a_number_is_the_current_one(named, meant, monkeypatch):
    entered = []
    monkeypatch.setattr("situs.data.prefetch._stream", lambda _: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    for name in ("Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    assert [int(batch.ids) for batch in prefetch(batch_of, range(3), torch.device(named))] == [0, 1, 2]
    assert entered == [torch.device(meant)]


@pytest.mark.parametrize("busy", [False, True])
def test_a_batch_that_comes_while_the_gpu_works_was_not_waited_for(busy, monkeypatch):
    monkeypatch.setattr(Pace, "busy", busy)
    slow = loader(augment=None)
    deque(slow.iterate(0), 0)
    assert (slow.data_wait == 0) == busy


def test_a_closed_loader_has_no_workers_and_begins_anew():
    others = set(multiprocessing.active_children())  # of loaders that another test left to the garbage collector
    made = loader(workers=2)
    first = next(made.iterate(0))
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    tasks = made.stream._tasks  # as the traceback of an error keeps it
    made.close()
    assert not any(worker.is_alive() for worker in workers)
    del tasks
    assert same(first, next(made.iterate(0)))
    made.close()


@pytest.fixture
def photographs(tmp_path):
    chance = np.random.default_rng(0)
    for number in range(40):
        coarse = chance.integers(0, 256, (9, 7, 3), dtype=np.uint8)
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        image = Image.fromarray(coarse).resize((90 + number, 120 - number))
        image.save(tmp_path / "ab"[number % 2] / f"{number}.jpg")
    (tmp_path / "a/4.jpg").write_bytes((tmp_path / "a/4.jpg").read_bytes()[:900])  # another stands in for it
    return tmp_path


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"workers": 2}])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_they_are_the_same_while_steps_run(photographs, options, compiled):
    """Each step reads its batch behind long products, when later ones are made; with TF32, as a training allows it."""
    config = replace(CONFIG, path=str(photographs), img_size=64, batch=8, **options)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = []
        for thread in (False, True):
            made = make_loader(config, AugmentConfig(), "cuda")
            assert made.prefetches
            made.prefetches = thread
            if compiled:
                made.compile()
            kept, weight = [], torch.randn(4096, 4096, device="cuda")
            for epoch in range(3):
                for batch in made.iterate(epoch):
                    for _ in range(40):
                        weight = torch.nn.functional.normalize(weight @ weight)
                    kept.append(Batch(*(part.clone() for part in batch[:2]), {"label": batch.targets["label"].clone()}))
            found.append(kept)
            assert made.source.skipped and not threads()
            assert torch.get_float32_matmul_precision() == "high"
        assert len(found[0]) == 15 and all(map(same, *found))
    finally:
        torch.set_float32_matmul_precision(before)
