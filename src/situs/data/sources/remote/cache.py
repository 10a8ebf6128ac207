"""A remote set as a local folder: its shards have their names and sizes there, and are fetched when they are needed.

A shard that is not fetched yet is a sparse placeholder without write permission: its size and times are those of the
shard, so that an index of it stays valid, and its content is zeros, so that reading it other than by `open_shard` fails
loudly. A shard is fetched in pieces under a temporary name, which a later process can resume, then checked and renamed.
Several processes share the folder: one fetches, the others wait. The least recently used shards of all sets are removed
for a new one; an open file stays readable.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

from situs import files
from situs.data.sources.remote.listing import SHARDS, Entry, list_set
from situs.data.sources.remote.transfer import RangedFile, RemoteError, read_pieces, redacted, state_of
from situs.errors import SitusError
from situs.files import read_json, write_bytes, write_text
from situs.folder_lock import in_turn

FOLDER, LIMIT = "SITUS_CACHE", "SITUS_CACHE_GIB"
"""Environment: the folder for remote shards (default: ~/.cache/situs/remote), and its most GiB (default: 64)."""

DEFAULT_BYTES = 64 << 30
"""Default limit of the cache."""

_LIST = ".shards.json"
_FRESH = 10  # seconds before a shard's last use is recorded again
_RECENT = 30.0  # seconds for which a list of shards is valid: a set's splits are opened one after the other
_mounted: dict[tuple[str, str], float] = {}
_known: dict[str, Entry] = {}
"""Entries by the shard's path, with their full addresses; forked workers inherit it."""


def cache_folder() -> Path:
    """The folder of the cache."""
    return Path(os.environ.get(FOLDER) or files.cache_folder("remote"))


def limit_bytes() -> int:
    """The limit of the cache."""
    gib = os.environ.get(LIMIT, str(DEFAULT_BYTES >> 30))
    try:
        limit = float(gib)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise SitusError(f"{LIMIT}={gib}: must be a number of GiB above 0")
    return int(limit * 2**30)


def mount(address: str) -> Path:
    """The local folder of a remote set. The servers are asked again after half a minute."""
    folder = cache_folder() / _slug(redacted(address))
    if time.monotonic() - _mounted.get((address, str(folder)), -_RECENT) < _RECENT and (folder / _LIST).is_file():
        return folder
    entries, small = list_set(address)
    before = {entry["name"]: entry for entry in _read_list(folder)}
    try:
        for entry in entries:
            path = folder / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if before.get(entry.name) != _public(entry) or not path.is_file():
                _put_placeholder(path, entry)  # the file here is of another version, or missing
            _known[str(path)] = entry
        for name, data in small.items():
            if not (folder / name).is_file() or (folder / name).read_bytes() != data:
                write_bytes(folder / name, data)
        write_text(folder / _LIST, json.dumps({"shards": [_public(entry) for entry in entries]}))
    except OSError as error:
        raise _unwritable(error) from error
    _mounted[address, str(folder)] = time.monotonic()
    return folder


def _slug(address: str) -> str:
    words = re.sub(r"[^\w]+", "-", address.partition("://")[2]).strip("-")[-40:]
    return f"{words}-{hashlib.sha256(address.encode()).hexdigest()[:8]}"


def _public(entry: Entry) -> dict[str, Any]:
    """An entry as it is written: without the address's query, which may hold a key."""
    return entry._replace(url=redacted(entry.url))._asdict()


def _read_list(folder: Path) -> list[dict[str, Any]]:
    try:
        return read_json(folder / _LIST)["shards"]
    except (SitusError, KeyError):
        return []


def _entry(path: Path) -> Entry | None:
    """The entry of a shard; None for a file that belongs to no remote set."""
    if str(path) not in _known and str(path).startswith(str(cache_folder())):  # in a worker that was not forked
        for folder in (path.parent, path.parent.parent):
            for entry in _read_list(folder):
                _known.setdefault(str(folder / entry["name"]), Entry(**entry))
    return _known.get(str(path))


def is_remote_shard(path: Path) -> bool:
    """Whether a file is a shard of a remote set."""
    return _entry(path) is not None


def ensure_local(path: Path) -> None:
    """Fetches a shard that is not here; any other file is left alone."""
    if is_remote_shard(path):
        os.close(open_shard(path))


def open_shard(path: Path) -> int:
    """The handle of a file to read; a shard of a remote set is fetched first where it is not here."""
    while True:
        handle = os.open(path, os.O_RDONLY)
        entry = _entry(path)
        if entry is None:
            return handle
        state = os.fstat(handle)
        if state.st_mode & stat.S_IWUSR:
            _record_use(path, state)
            return handle
        os.close(handle)
        try:
            _fetch(path, entry)
        except OSError as error:
            raise _unwritable(error) from error


def open_remote(path: Path, *, parts: bool = False) -> io.RawIOBase:
    """A shard as a file object. parts: small parts are read, from the server where the shard is not here."""
    entry = _entry(path)
    if parts and entry is not None and not path.stat().st_mode & stat.S_IWUSR:
        return RangedFile(entry.url, entry.size)
    return _AutoClosedFile(open_shard(path))


class _AutoClosedFile(io.FileIO):
    """Closed when it is collected."""

    def __del__(self) -> None:
        self.close()


def _unwritable(error: OSError) -> SitusError:
    reason = (error.strerror or str(error)).lower()
    return SitusError(
        f"{cache_folder()}: cannot store remote shards: {reason}; free some space, or keep them elsewhere ({FOLDER})"
    )


def _record_use(path: Path, state: os.stat_result) -> None:
    """Sets the time of access; the time of change stays, because indexes of a shard are valid for it."""
    if time.time() - state.st_atime > _FRESH:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), state.st_mtime_ns))


def _put_placeholder(path: Path, entry: Entry) -> None:
    """Puts a placeholder in the place of a shard."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.truncate(entry.size)
    os.utime(temporary, ns=(0, _stamp(entry)))
    temporary.chmod(stat.S_IRUSR)
    temporary.replace(path)


def _fetch(path: Path, entry: Entry) -> None:
    with in_turn(_lock(path)):
        if path.stat().st_mode & stat.S_IWUSR:
            return  # another process has fetched it in the meantime
        part = path.with_name(f".{path.name}.{_mark(entry)}.part")
        for other in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            if other != part:  # of a version that is gone
                other.unlink()
        with in_turn(cache_folder() / ".limit.lock"):  # the next process that frees space counts this part
            _free_space(entry, path)
            part.touch()
        with part.open("ab") as file:
            for data in read_pieces(entry.url, part.stat().st_size, entry.size):
                file.write(data)
                file.flush()
            os.fsync(file.fileno())
        try:
            _check(part, entry)
        except RemoteError:
            part.unlink()
            raise
        os.utime(part, ns=(time.time_ns(), _stamp(entry)))
        part.chmod(stat.S_IRUSR | stat.S_IWUSR)
        part.replace(path)


def _lock(path: Path) -> Path:
    """The lock of a process that fetches a shard, or removes what a fetch has left."""
    return path.with_name(f".{path.name}.lock")


def _stamp(entry: Entry) -> int:
    """A shard's time of change, in ns: depends on its version alone."""
    return int(_mark(entry)[:7], 16) * 10**9


def _mark(entry: Entry) -> str:
    """The hash of a shard's version."""
    return hashlib.sha256(f"{entry.size} {entry.version} {entry.sha256}".encode()).hexdigest()[:12]


def _check(part: Path, entry: Entry) -> None:
    """Checks the size and the SHA-256 of what was fetched."""
    if part.stat().st_size != entry.size:
        raise RemoteError(f"{redacted(entry.url)}: {part.stat().st_size:,} bytes came instead of {entry.size:,}")
    if entry.sha256:
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                origin = "its server lists" if entry.version else "was packed"
                raise RemoteError(f"{redacted(entry.url)}: differs from what {origin} (SHA-256)")
        return
    _check_version(entry)


def check_unchanged(path: Path) -> None:
    """Refuses a shard of a remote set that was changed since the set was opened; any other file is left alone."""
    if (entry := _entry(path)) is not None:
        _check_version(entry)


def _check_version(entry: Entry) -> None:
    now = state_of(entry.url)  # the manifest of a packed set has no versions
    if now.size != entry.size or (not entry.sha256 and now.version != entry.version):
        raise RemoteError(f"{redacted(entry.url)}: was changed since the set was opened; open it again")


def _free_space(entry: Entry, path: Path) -> None:
    """Removes the least recently used shards of all sets until this one is within the limit."""
    limit = limit_bytes()
    if entry.size > limit:
        size, most = (f"{count / 2**30:.2f} GiB" for count in (entry.size, limit))
        raise SitusError(f"{redacted(entry.url)}: has {size}, but the cache holds {most}; allow more ({LIMIT})")
    cached = []
    for file in cache_folder().rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed by another process
            state = file.stat()
            if not stat.S_ISREG(state.st_mode) or not state.st_mode & stat.S_IWUSR:
                continue
            if file.suffix == ".part" and _shard_of(file) != path:  # counted with its final size
                cached.append((state.st_mtime, max(state.st_size, _shard_of(file).stat().st_size), file))
            elif file.suffix in SHARDS:
                cached.append((state.st_atime, state.st_size, file))
    total = entry.size + sum(size for _, size, _ in cached)
    for _, size, file in sorted(cached, key=lambda item: item[0]):
        if total <= limit:
            return
        if file.suffix == ".part":
            with contextlib.suppress(FileNotFoundError), in_turn(_lock(_shard_of(file)), wait=False) as locked:
                if locked:  # no other process fetches it
                    file.unlink()
                    total -= size
        elif (other := _entry(file)) is not None:
            _put_placeholder(file, other)
            total -= size


def _shard_of(part: Path) -> Path:
    """The shard that a part is fetched for."""
    return part.with_name(part.name[1:].rsplit(".", 2)[0])
