"""Work in the set's order, whoever does it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_files import noise
from recipes import recipe
from warm import Warm

from situs.data import work
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.work import in_order, process_results
from situs.errors import SitusError


def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def fail(numbers: list[int]) -> list[int]:
    if 5 in numbers:
        raise SitusError("five: must not be", field="data")
    return numbers


def die(numbers: list[int]) -> list[int]:
    os._exit(9)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_is_that_of_the_numbers(workers):
    assert [*in_order(double, range(3, 14), workers, at_once=4)] == [[6, 8, 10, 12], [14, 16, 18, 20], [22, 24, 26]]
    assert [*in_order(double, range(0), workers)] == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_comes_as_its_own_sentence(workers):
    with pytest.raises(SitusError, match=r"^five: must not be$") as met:
        [*in_order(fail, range(9), workers, at_once=2)]
    assert met.value.fields == ("data",) or workers


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_a_worker_does_not_collect_what_its_parent_left(tmp_path: Path) -> None:
    """A tensor on a GPU in such garbage would abort the worker."""
    parent, collected = os.getpid(), tmp_path / "collected"

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                collected.touch()

    gc.collect()
    gc.disable()
    try:
        Garbage()
        assert list(in_order(lambda numbers: (gc.collect(), numbers)[1], range(2), workers=1, at_once=1)) == [[0], [1]]
    finally:
        gc.enable()
    assert not collected.exists()


def test_a_killed_worker_is_one_sentence():
    with pytest.raises(SitusError, match="a worker process was killed"):
        [*in_order(die, range(9), 1)]


def waited_for(numbers: list[int]) -> list[str]:
    return [each.name for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]


def test_a_worker_ends_without_waiting_for_a_thread_of_its_own():
    """Its watch over the parent lasts as long as the parent."""
    assert [*in_order(waited_for, range(2), 1, at_once=1)] == [[], []]


def process(numbers: list[int]) -> int:
    return os.getpid()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_worker_leaves_the_first_signal_to_its_parent(number: int) -> None:
    results = iter(process_results(process, [[task] for task in range(12)], 1, 1))
    worker = next(results)
    os.kill(worker, number)
    assert {*results} == {worker}


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Each has more to hand over than a pipe holds, so that it cannot end by itself."""
    script = """
import os, sys, time
from situs.data.work import in_order

def make(numbers):
    open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    return bytes(1 << 20)

for _ in in_order(make, range(10_000), workers=1, at_once=1):
    print("one", flush=True)
    time.sleep(100)
"""
    with Warm("-c", script, tmp_path) as parent:
        assert parent.stdout.readline() == "one\n"
        parent.kill()
    [worker] = [int(path.name) for path in tmp_path.iterdir()]
    end = time.monotonic() + 30
    while time.monotonic() < end and Path(f"/proc/{worker}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
def test_other_systems_than_linux_spawn_their_workers(tmp_path, monkeypatch):
    """A worker that is not forked is given everything by pickle: the batches are the same."""
    for number in range(6):
        (tmp_path / f"photos/{'ab'[number % 2]}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"photos/{'ab'[number % 2]}/{number}.png").write_bytes(noise(number, 20, 24))
    config = DataConfig(path=str(tmp_path / "photos"), img_size=16, batch=3, workers=0, resident="never")
    here = [*make_loader(config, recipe("crop")).iterate(0)]
    monkeypatch.setattr(work, "sys", types.SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    there = [*make_loader(replace(config, workers=1), recipe("crop")).iterate(0)]
    assert len(here) == len(there) == 2
    assert all(torch.equal(a.inputs, b.inputs) and torch.equal(a.ids, b.ids) for a, b in zip(here, there, strict=True))
