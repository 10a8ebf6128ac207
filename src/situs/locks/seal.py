"""Files encrypted at rest: AES-256-GCM in chunks of 1 MiB, so a file of any size is streamed in little memory.

    file = magic, chunk 0, chunk 1, …, last chunk          chunk = ciphertext, tag of 16 bytes

Every file of every lock has a key of its own: HKDF(seed; lock id, name). The number of a chunk and whether it is the
last are its nonce and its associated data: a chunk that was moved, removed, truncated or added fails to open.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from situs.errors import SitusError, missing_extra
from situs.locks.key import Key
from situs.locks.manifest import Manifest
from situs.locks.shards import ByteSource, Sink, open_file, plain_source

MAGIC = b"SITUSEA1"
SUFFIX = ".sealed"
CHUNK = 1 << 20
TAG = 16


def _cipher(key: Key, lock_id: str, name: str) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise missing_extra("cryptography", "locks", "a sealed file") from error
    return AESGCM(key.subkey("seal", lock_id, name))


def _nonce(index: int, last: bool) -> bytes:
    return index.to_bytes(11, "big") + bytes([last])


class SealingSink:
    """Encrypts what is written to it; `close` writes the last chunk."""

    def __init__(self, sink: Sink, cipher: Any) -> None:
        self._sink, self._cipher = sink, cipher
        self._buffer, self._index = bytearray(), 0
        sink.write(MAGIC)

    def write(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            if len(self._buffer) == CHUNK:  # a full chunk is kept until it is known not to be the last
                self._put(last=False)
            taken = min(CHUNK - len(self._buffer), len(view))
            self._buffer += view[:taken]
            view = view[taken:]

    def close(self) -> None:
        self._put(last=True)

    def _put(self, last: bool) -> None:
        nonce = _nonce(self._index, last)
        self._sink.write(self._cipher.encrypt(nonce, bytes(self._buffer), nonce))
        self._buffer.clear()
        self._index += 1


class SealedSource:
    """Decrypts a file as it is read; a chunk is authenticated before any byte of it is returned."""

    def __init__(self, file: BinaryIO, path: Path, cipher: Any) -> None:
        self._file, self._path, self._cipher = file, path, cipher
        body = path.stat().st_size - len(MAGIC)
        self._chunks = max(1, -(-body // (CHUNK + TAG)))
        self.size = body - TAG * self._chunks
        self._index, self._open = 0, memoryview(b"")
        if self.size < 0 or file.read(len(MAGIC)) != MAGIC:
            raise SitusError(f"{path.name}: is not a sealed file, or is truncated")

    def fill(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            if not self._open:
                self._next()
            taken = min(len(self._open), len(into) - done)
            into[done : done + taken] = self._open[:taken]
            self._open = self._open[taken:]
            done += taken

    def finish(self) -> None:
        """Authenticates the chunks that were not read."""
        while self._index < self._chunks:
            self._next()

    def _next(self) -> None:
        from cryptography.exceptions import InvalidTag

        if self._index == self._chunks:
            raise SitusError(f"{self._path.name}: the file ends too early: it is truncated")
        nonce = _nonce(self._index, self._index == self._chunks - 1)
        try:
            chunk = self._cipher.decrypt(nonce, self._file.read(CHUNK + TAG), nonce)
        except (InvalidTag, ValueError):
            raise SitusError(
                f"{self._path.name}: the sealed file was altered or truncated, or the key is wrong"
            ) from None
        self._index += 1
        self._open = memoryview(chunk)


@contextmanager
def sealed_source(path: Path, key: Key, lock_id: str, name: str) -> Iterator[SealedSource]:
    """A sealed file, read from its beginning; leaving the context authenticates all of it."""
    with io.BufferedReader(open_file(path)) as file:  # pyright: ignore[reportArgumentType]
        source = SealedSource(file, path, _cipher(key, lock_id, name))
        yield source
        source.finish()


@contextmanager
def writing(sink: Sink, seal: Key | None, lock_id: str, name: str) -> Iterator[Sink]:
    """Where to write a file of a lock: encrypted if `seal` is a key. name: of the decrypted file."""
    if seal is None:
        yield sink
        return
    sealing = SealingSink(sink, _cipher(seal, lock_id, name))
    yield sealing
    sealing.close()


@contextmanager
def new_file(
    folder: Path | None, name: str, seal: Key | None = None, lock_id: str = "", *, private: bool = False
) -> Iterator[Sink | None]:
    """A new file in `folder`; None if there is no folder. private: readable only by its owner from the start."""
    if folder is None:
        yield None
        return
    path = folder / (name if seal is None else name + SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with os.fdopen(handle, "wb") as file, writing(file, seal, lock_id, name) as sink:
        yield sink


def reading(path: Path, name: str, manifest: Manifest, key: Key) -> AbstractContextManager[ByteSource]:
    """A file of a lock, decrypted if it is sealed. name: of the decrypted file."""
    return sealed_source(path, key, manifest.lock_id, name) if manifest.sealed else plain_source(path)


def locked_file(folder: Path, name: str, manifest: Manifest, key: Key) -> AbstractContextManager[ByteSource]:
    """A file of a locked folder."""
    path = folder / (name + SUFFIX if manifest.sealed else name)
    if not path.is_file():
        raise SitusError(f"{folder}: {path.name} is missing")
    return reading(path, name, manifest, key)
