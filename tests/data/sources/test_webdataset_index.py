"""The kept index of tar shards: the same as a fresh one, good until a shard changes, rebuilt where it is damaged."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from situs.data.open import open_source
from situs.data.sources import webdataset
from situs.data.sources.webdataset import TarIndex, TarSource, open_index


def write_shard(path: Path, start: int, count: int, more: dict[str, bytes] | None = None) -> Path:
    members = {}
    for number in range(start, start + count):
        members |= {f"deep/{number:03}.jpg": b"x" * number, f"deep/{number:03}.cls": b"%d" % (number % 3)}
    with tarfile.open(path, "w") as file:
        for name, data in (members | (more or {})).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(webdataset, "_WORTH_CACHING", 0)
    return tmp_path / "cache" / "situs" / "tar"


@pytest.fixture
def shards(tmp_path):
    return [
        write_shard(tmp_path / "a.tar", 0, 5, {"deep/note.json": b"{}", "ü\udcff.txt": b""}),
        write_shard(tmp_path / "b.tar", 5, 3),
        write_shard(tmp_path / "c.tar", 8, 4),
    ]


@pytest.fixture
def read(monkeypatch):
    """The shards that were read header by header."""
    found: list[str] = []
    whole = webdataset._images
    monkeypatch.setattr(webdataset, "_images", lambda file, *more: found.append(file.name) or whole(file, *more))
    return found


def everything(index: TarIndex) -> list[object]:
    arrays = {name: values.tolist() for name, values in index.arrays.items()}
    names = [index.name(number) for number in range(len(index))]
    return [arrays, names, index.left_out]


def test_a_kept_index_is_the_one_that_was_read(cache, shards, read, monkeypatch):
    monkeypatch.setattr(webdataset, "_WORTH_CACHING", 1 << 40)
    fresh = open_index(shards, labels=True)
    assert not cache.exists()
    assert (fresh.arrays["ends"].tolist(), fresh.name(7)) == ([5, 8, 12], "deep/007.jpg")
    assert fresh.arrays["labels"].tolist() == [number % 3 for number in range(12)]
    assert fresh.left_out.kinds == {".json": 1, ".txt": 1}
    monkeypatch.setattr(webdataset, "_WORTH_CACHING", 0)
    read.clear()
    kept = [open_index(shards, labels=True) for _ in range(2)]
    assert read == ["a.tar", "b.tar", "c.tar"]  # once
    assert all(everything(each) == everything(fresh) for each in kept)
    without = open_index(shards, labels=False)  # another index
    assert without.arrays["labels"].tolist() == [-1] * 12
    assert len(list(cache.glob("*.npz"))) == 6


def test_shards_that_changed_are_read_again(cache, shards, read):
    open_index(shards, labels=True)
    write_shard(shards[1], 50, 6)
    index = open_index(shards, labels=True)
    assert index.arrays["ends"].tolist() == [5, 11, 15] and index.name(5) == "deep/050.jpg"
    # As large as before, and of another time.
    state = shards[2].stat()
    os.utime(shards[2], ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    read.clear()
    assert everything(open_index(shards, labels=True)) == everything(index)
    assert read == ["c.tar"]  # the others are as they were
    # As large as before and of the same time, as rsync and cp -p make it: the class of image 8 is another.
    state = shards[2].stat()
    shards[2].write_bytes(shards[2].read_bytes().replace(b"2" + bytes(511), b"1" + bytes(511), 1))
    os.utime(shards[2], ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (shards[2].stat().st_size, shards[2].stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert everything(open_index(shards, labels=True)) != everything(index)


def test_a_damaged_file_is_made_again(cache, shards, read):
    fresh = everything(open_index(shards, labels=True))
    file = max(cache.glob("*.npz"), key=lambda each: each.stat().st_size)
    whole = file.read_bytes()
    chance = np.random.default_rng(0)
    for number in range(12):
        damaged = bytearray(whole)
        if number == 0:
            damaged = bytearray()
        elif number % 3 == 0:
            del damaged[int(chance.integers(len(whole))) :]
        else:
            place = 0 if number == 1 else int(chance.integers(8, len(whole)))
            damaged[place] ^= 1 << int(chance.integers(8))
        file.write_bytes(bytes(damaged))
        assert everything(open_index(shards, labels=True)) == fresh


def test_several_at_once_make_one_file(cache, shards, read):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: everything(open_index(shards, labels=True)), range(4)))
    assert all(each == found[0] for each in found)
    assert read == ["a.tar", "b.tar", "c.tar"]  # by the first; the others waited


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(webdataset, "_WORTH_CACHING", 0)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    index = open_index(shards, labels=True)
    assert len(index) == 12
    assert everything(pickle.loads(pickle.dumps(index))) == everything(index)


def test_a_source_goes_to_a_worker_that_is_started_anew(cache, shards, tmp_path):
    source = open_source(tmp_path)
    assert isinstance(source, TarSource)
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert (each.payload(9), each.label(9), each.key(9)) == (b"x" * 9, 0, "c.tar/deep/009.jpg")
