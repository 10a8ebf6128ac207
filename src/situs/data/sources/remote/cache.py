"""A remote set as a local folder: its shards have their names and sizes there, and are fetched when they are needed.

What is not here yet is a sparse file without permission to write: its size and times are those of the shard, so that an
index of it stays true, and its content is zeros, which is no shard, so that whoever does not come through `open_shard`
fails loudly. A shard is fetched in pieces under a temporary name, with which a later process goes on, checked, and
renamed. Several processes share the folder: one fetches, the others wait for it. The least recently used shards of all
sets give way to a new one; a file that is open stays whole.
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
"""Environment: where remote shards are kept (default: ~/.cache/situs/remote), and how many GiB (default: 64)."""

USUAL_BYTES = 64 << 30
"""What is kept where nobody said how much."""

_LIST = ".shards.json"
_FRESH = 10  # seconds for which a shard's last use need not be noted again
_RECENT = 30.0  # seconds for which a list of shards is good: a set's splits are opened one after the other
_mounted: dict[tuple[str, str], float] = {}
_known: dict[str, Entry] = {}
"""Entries by the shard's path, with their whole addresses; forked workers inherit it."""


def cache_folder() -> Path:
    """Where remote sets are kept."""
    return Path(os.environ.get(FOLDER) or files.cache_folder("remote"))


def limit_bytes() -> int:
    """How much of them is kept."""
    given = os.environ.get(LIMIT, str(USUAL_BYTES >> 30))
    try:
        limit = float(given)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise SitusError(f"{LIMIT}={given}: must be a number of GiB above 0")
    return int(limit * 2**30)


def mount(address: str) -> Path:
    """The folder that stands for a remote set. What the servers say of it is asked again after half a minute."""
    folder = cache_folder() / _slug(redacted(address))
    if time.monotonic() - _mounted.get((address, str(folder)), -_RECENT) < _RECENT and (folder / _LIST).is_file():
        return folder
    entries, small = list_set(address)
    before = {held["name"]: held for held in _read_list(folder)}
    try:
        for entry in entries:
            path = folder / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if before.get(entry.name) != _public(entry) or not path.is_file():
                _set_aside(path, entry)  # what is here is of another version, or nothing
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
    """What is kept of an entry: without the address's query, which may hold a key."""
    return entry._replace(url=redacted(entry.url))._asdict()


def _read_list(folder: Path) -> list[dict[str, Any]]:
    try:
        return read_json(folder / _LIST)["shards"]
    except (SitusError, KeyError):
        return []


def _entry(path: Path) -> Entry | None:
    """What is known of a shard; None for a file that is no remote set's."""
    known = _known.get(str(path))
    if known is None and str(path).startswith(str(cache_folder())):  # a worker that was started anew
        for folder in (path.parent, path.parent.parent):
            for held in _read_list(folder):
                _known.setdefault(str(folder / held["name"]), Entry(**held))
        known = _known.get(str(path))
    return known


def is_kept(path: Path) -> bool:
    """Whether a file is a shard of a remote set."""
    return _entry(path) is not None


def present(path: Path) -> None:
    """Fetches a shard that is not here; any other file is left alone."""
    if is_kept(path):
        os.close(open_shard(path))


def open_shard(path: Path) -> int:
    """A file to read, by its handle; a shard of a remote set is fetched first where it is not here."""
    while True:
        handle = os.open(path, os.O_RDONLY)
        entry = _entry(path)
        if entry is None:
            return handle
        state = os.fstat(handle)
        if state.st_mode & stat.S_IWUSR:
            _note_use(path, state)
            return handle
        os.close(handle)
        try:
            _fetch(path, entry)
        except OSError as error:
            raise _unwritable(error) from error


def opened(path: Path, *, parts: bool = False) -> io.RawIOBase:
    """A shard as a file object. parts: only a little is read, and asked of the server where the shard is not here."""
    entry = _entry(path)
    if parts and entry is not None and not path.stat().st_mode & stat.S_IWUSR:
        return RangedFile(entry.url, entry.size)
    return _KeptFile(open_shard(path))


class _KeptFile(io.FileIO):
    """Closed when nobody has it any more."""

    def __del__(self) -> None:
        self.close()


def _unwritable(error: OSError) -> SitusError:
    said = (error.strerror or str(error)).lower()
    return SitusError(
        f"{cache_folder()}: cannot store remote shards: {said}; free some space, or keep them elsewhere ({FOLDER})"
    )


def _note_use(path: Path, state: os.stat_result) -> None:
    """By the time of access alone: indexes of a shard are held to its time of change."""
    if time.time() - state.st_atime > _FRESH:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), state.st_mtime_ns))


def _set_aside(path: Path, entry: Entry) -> None:
    """Puts the placeholder of a shard in its place."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("wb") as file:
        file.truncate(entry.size)
    os.utime(aside, ns=(0, _stamp(entry)))
    aside.chmod(stat.S_IRUSR)
    aside.replace(path)


def _fetch(path: Path, entry: Entry) -> None:
    with in_turn(_lock(path)):
        if path.stat().st_mode & stat.S_IWUSR:
            return  # another process has fetched it meanwhile
        part = path.with_name(f".{path.name}.{_mark(entry)}.part")
        for other in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            if other != part:  # of a version that is gone
                other.unlink()
        with in_turn(cache_folder() / ".limit.lock"):  # who frees space next counts this one
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
    """Held by whoever fetches a shard, or takes away what a fetch has left."""
    return path.with_name(f".{path.name}.lock")


def _stamp(entry: Entry) -> int:
    """A shard's time of change, in ns: the same whenever it is fetched, and another for another version."""
    return int(_mark(entry)[:7], 16) * 10**9


def _mark(entry: Entry) -> str:
    """Of a shard's version."""
    return hashlib.sha256(f"{entry.size} {entry.version} {entry.sha256}".encode()).hexdigest()[:12]


def _check(part: Path, entry: Entry) -> None:
    """Holds what was fetched to what the set promised."""
    if part.stat().st_size != entry.size:
        raise RemoteError(f"{redacted(entry.url)}: {part.stat().st_size:,} bytes came and not {entry.size:,}")
    if entry.sha256:
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise RemoteError(
                    f"{redacted(entry.url)}: is not what was packed: its SHA-256 differs from its manifest's"
                )
        return
    _check_version(entry)


def check_unchanged(path: Path) -> None:
    """Refuses a shard of a remote set that was changed since the set was opened; any other file is left alone."""
    if (entry := _entry(path)) is not None:
        _check_version(entry)


def _check_version(entry: Entry) -> None:
    now = state_of(entry.url)  # of a shard that a manifest tells of, no version was asked for
    if now.size != entry.size or (not entry.sha256 and now.version != entry.version):
        raise RemoteError(f"{redacted(entry.url)}: was changed since the set was opened; open it again")


def _free_space(entry: Entry, path: Path) -> None:
    """Lets go of the least recently used shards of all sets until this one is within the limit."""
    limit = limit_bytes()
    if entry.size > limit:
        size, kept = (f"{count / 2**30:.2f} GiB" for count in (entry.size, limit))
        raise SitusError(f"{redacted(entry.url)}: has {size}, and {kept} are kept of remote sets; allow more ({LIMIT})")
    held = []
    for file in cache_folder().rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed by another process
            state = file.stat()
            if not stat.S_ISREG(state.st_mode) or not state.st_mode & stat.S_IWUSR:
                continue
            if file.suffix == ".part" and _whole(file) != path:  # as much as it will take
                held.append((state.st_mtime, max(state.st_size, _whole(file).stat().st_size), file))
            elif file.suffix in SHARDS:
                held.append((state.st_atime, state.st_size, file))
    total = entry.size + sum(size for _, size, _ in held)
    for _, size, file in sorted(held, key=lambda each: each[0]):
        if total <= limit:
            return
        if file.suffix == ".part":
            with contextlib.suppress(FileNotFoundError), in_turn(_lock(_whole(file)), wait=False) as mine:
                if mine:  # nobody is fetching it
                    file.unlink()
                    total -= size
        elif (other := _entry(file)) is not None:
            _set_aside(file, other)
            total -= size


def _whole(part: Path) -> Path:
    """The shard that a part is fetched for."""
    return part.with_name(part.name[1:].rsplit(".", 2)[0])
