from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from situs.errors import SitusError
from situs.locks import seal
from situs.locks.key import Key
from situs.locks.seal import MAGIC, locked_file, new_file, sealed_source, writing

pytest.importorskip("cryptography")

KEY, CHUNK, TAG = Key(bytes(range(32))), 64, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(seal, "CHUNK", CHUNK)


def sealed(data: bytes, key: Key = KEY, lock_id: str = "ab", name: str = "x", pieces: int = 7) -> bytes:
    out = io.BytesIO()
    with writing(out, key, lock_id, name) as sink:
        for at in range(0, len(data), pieces):
            sink.write(data[at : at + pieces])
    return out.getvalue()


def opened(
    raw: bytes, place: Path, key: Key = KEY, lock_id: str = "ab", name: str = "x", read: int | None = None
) -> bytes:
    (place / "x.sealed").write_bytes(raw)
    with sealed_source(place / "x.sealed", key, lock_id, name) as source:
        into = bytearray(source.size if read is None else read)
        source.fill(memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 11])
def test_there_and_back(tmp_path, size):
    data = bytes(i % 251 for i in range(size))
    raw = sealed(data)
    assert opened(raw, tmp_path) == data
    assert sealed(data, pieces=1000) == raw  # however it is written
    assert len(raw) == len(MAGIC) + size + TAG * max(1, -(-size // CHUNK))


def test_nothing_of_the_clear_bytes_is_left_and_no_two_chunks_are_alike():
    raw = sealed(bytes(4 * CHUNK))
    chunks = [raw[len(MAGIC) + i * (CHUNK + TAG) :][: CHUNK + TAG] for i in range(4)]
    assert len(set(chunks)) == 4 and bytes(8) not in raw
    assert sealed(bytes(64), name="y") != sealed(bytes(64)) != sealed(bytes(64), lock_id="cd")


def test_bound_to_key_lock_and_name(tmp_path):
    raw = sealed(b"hello")
    for other in (dict(key=Key(bytes(32))), dict(lock_id="cd"), dict(name="y")):
        with pytest.raises(SitusError, match="altered or truncated, or the key is wrong"):
            opened(raw, tmp_path, **other)


def test_chunks_may_not_be_moved_cut_or_added(tmp_path):
    data = bytes(range(256))[: 3 * CHUNK]
    raw = sealed(data)
    whole = CHUNK + TAG
    parts = [raw[len(MAGIC) + i * whole :][:whole] for i in range(3)]
    for order in ([1, 0, 2], [0, 1], [0, 2], [1, 2], [0, 1, 2, 2], [0, 0, 1, 2], [2], [0]):
        with pytest.raises(SitusError):
            opened(MAGIC + b"".join(parts[i] for i in order), tmp_path)
    with pytest.raises(SitusError, match="not a sealed file"):
        opened(MAGIC, tmp_path)
    with pytest.raises(SitusError, match="not a sealed file"):
        opened(b"SITUSEA2" + raw[8:], tmp_path)


def test_a_file_read_in_part_is_still_checked_to_its_end(tmp_path):
    raw = bytearray(sealed(bytes(3 * CHUNK)))
    assert opened(bytes(raw), tmp_path, read=10) == bytes(10)
    raw[-1] ^= 1
    with pytest.raises(SitusError, match="altered"):
        opened(bytes(raw), tmp_path, read=10)


def test_reading_past_the_end(tmp_path):
    with pytest.raises(SitusError, match="ends too early"):
        opened(sealed(b"abc"), tmp_path, read=4)


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), size=st.integers(0, 300))
def test_every_bit_counts(tmp_path_factory, at, bit, size):
    raw = bytearray(sealed(bytes(size)))
    raw[at % len(raw)] ^= 1 << bit
    with pytest.raises(SitusError):
        opened(bytes(raw), tmp_path_factory.mktemp("seal"))


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_new_file_has_its_folders_its_rights_and_replaces_nothing(tmp_path, key, private, mode):
    before = os.umask(0o022)
    try:
        with new_file(tmp_path / "locked", "deep/er/x.txt", key, "ab", private=private) as sink:
            sink.write(b"hello")
    finally:
        os.umask(before)
    path = tmp_path / "locked" / "deep" / "er" / ("x.txt" if key is None else "x.txt.sealed")
    assert path.stat().st_mode & 0o777 == mode and (path.read_bytes() == b"hello") == (key is None)
    if key is not None:
        with sealed_source(path, key, "ab", "deep/er/x.txt") as source:
            into = bytearray(5)
            source.fill(memoryview(into))
        assert bytes(into) == b"hello"
    with pytest.raises(FileExistsError), new_file(tmp_path / "locked", "deep/er/x.txt", key, "ab"):
        pass
    with new_file(None, "x.txt", key) as sink:
        assert sink is None


@pytest.mark.parametrize("sealed_", [True, False])
def test_a_file_of_a_lock_that_is_not_there_is_named(tmp_path, sealed_):
    manifest = SimpleNamespace(sealed=sealed_, lock_id="ab")
    with pytest.raises(SitusError, match=r"x\.txt(\.sealed)? is missing") as error:
        locked_file(tmp_path, "x.txt", manifest, KEY)
    assert str(error.value).endswith(f"x.txt{'.sealed' * sealed_} is missing")
    with new_file(tmp_path, "x.txt", KEY if sealed_ else None, "ab") as sink:
        sink.write(b"abc")
    with locked_file(tmp_path, "x.txt", manifest, KEY) as source:
        into = bytearray(3)
        source.fill(memoryview(into))
    assert bytes(into) == b"abc"


def test_a_seal_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with (
        pytest.raises(
            SitusError, match=r"a sealed file needs the package 'cryptography': pip install 'situs\[locks\]'"
        ),
        new_file(tmp_path, "x.txt", KEY, "ab"),
    ):
        pass
