"""Shards on servers (http, https, s3, …) as a local folder: names and sizes are there, shards are fetched when needed.

A shard that is not fetched yet is a sparse placeholder without write permission: its size and times are those of the
shard, so that an index of it stays valid, and its content is zeros, so that reading it other than by `open_shard` fails
loudly. A shard is fetched in pieces under a temporary name, which a later process can resume, then checked and renamed.
Several processes share the folder: one fetches, the others wait. The least recently used shards of all sets are removed
for a new one; an open file stays readable.

Temporary failures (a cut connection, a 5xx, a timeout) are retried after a growing pause; permanent ones (no such file,
no permission) are one sentence at once. Web servers are read by Python's own client, which keeps no thread or
connection that a forked worker would inherit; every other scheme goes through fsspec.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from situs import files
from situs.data.sources.base import SPLIT_WORDS
from situs.data.sources.manifest import CLASSES, MANIFEST, parse_manifest
from situs.errors import DataError, SitusError, first_line, missing_extra, reason_of
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
    reason = reason_of(error)
    return SitusError(
        f"{cache_folder()}: cannot store remote shards: {reason}; free some space, or choose another folder ({FOLDER})"
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
        raise RemoteError(f"{redacted(entry.url)}: has changed since the set was opened; open the set again")


def _free_space(entry: Entry, path: Path) -> None:
    """Removes the least recently used shards of all sets until this one is within the limit."""
    limit = limit_bytes()
    if entry.size > limit:
        size, most = (f"{count / 2**30:.2f} GiB" for count in (entry.size, limit))
        raise SitusError(
            f"{redacted(entry.url)}: the size of the shard is {size}, but the cache may hold at most {most}; "
            f"raise the limit of the cache ({LIMIT})"
        )
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


SHARDS = (".parquet", ".tar")
_AT_ONCE = 16  # requests


class Entry(NamedTuple):
    """A shard. name: its path in the set. version: the server's mark of it. sha256: where a manifest or the server has
    it."""

    name: str
    url: str
    size: int
    version: str = ""
    sha256: str = ""


def list_set(address: str) -> tuple[list[Entry], dict[str, bytes]]:
    """The shards at an address, and the small files beside them (classes.txt, the manifest), by name.

    address: a pattern of shards, one shard, a manifest.json that `situs data pack` wrote, or a folder: one with such a
    manifest, or of an object store that can be listed.
    """
    check_address(address)
    if any(address.partition("?")[0].endswith(suffix) for suffix in SHARDS):
        urls = expand(address)
        bare = urls[0].partition("?")[0]
        return _entries(urls), _class_file(bare.rpartition("/")[0]) if bare.endswith(".tar") else {}
    folder = address.rstrip("/").removesuffix(f"/{MANIFEST}")
    data = _optional(f"{folder}/{MANIFEST}")
    manifest = None if data is None else parse_manifest(data, redacted(f"{folder}/{MANIFEST}"))
    if data is not None and manifest is not None:
        lines, shards = "".join(f"{name}\n" for name in manifest.get("classes") or ()), manifest["shards"]
        entries = [
            Entry(shard["file"], f"{folder}/{shard['file']}", shard["bytes"], "", shard["sha256"]) for shard in shards
        ]
        return entries, {MANIFEST: data, **({CLASSES: lines.encode()} if lines else {})}
    if urlsplit(address).scheme in {"http", "https"}:
        raise DataError(
            f"{redacted(address)}: must name shards (…/train-{{000..099}}.tar, .parquet), or the "
            "folder of a packed set "
            f"with its {MANIFEST}, because a web server does not list files"
        )
    folders = [folder, f"{folder}/data", *(f"{folder}/{word}" for word in SPLIT_WORDS)]  # as for local shards
    urls = [url for place in folders for url in list_folder(place) if url.endswith(SHARDS)]
    if not urls:
        raise DataError(f"{redacted(address)}: contains no parquet or tar files")
    return _entries(urls), _class_file(folder)


def _entries(urls: list[str]) -> list[Entry]:
    """The entries of shards, with sizes and versions from their servers."""
    names = [_name(url) for url in urls]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{redacted(urls[0])}, …: two shards are called {twice}")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        states = list(pool.map(state_of, urls))
    return [Entry(name, url, *state) for name, url, state in zip(names, urls, states, strict=True)]


def _name(url: str) -> str:
    path = PurePosixPath(urlsplit(url).path)
    return f"{path.parent.name}/{path.name}" if path.parent.name in {"data", *SPLIT_WORDS} else path.name


def _class_file(folder: str) -> dict[str, bytes]:
    """The file of class names beside tar shards, where there is one."""
    names = _optional(f"{folder}/{CLASSES}")
    return {} if names is None else {CLASSES: names}


def _optional(url: str) -> bytes | None:
    try:
        return read_whole(url)
    except RemoteError as error:
        if isinstance(error.__cause__, FileNotFoundError) or status_of(error.__cause__) in {403, 404, 410}:
            return None
        raise


_MOST = 100_000
_BRACES = re.compile(r"\{([^{}]*)\}")


def is_remote(path: object) -> bool:
    """Whether a path is a remote address: https://…, s3://…"""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def redacted(text: str) -> str:
    """Text with the addresses in it without user, password and query, which may hold a key."""
    return re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>()]+", lambda match: _bare(match[0]), text)


def _bare(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_address(url: str) -> None:
    """Refuses a password: paths are written to configs and shown in pages."""
    if "@" in urlsplit(url).netloc and urlsplit(url).scheme in {"http", "https", "ftp", "sftp"}:
        raise DataError(
            f"{redacted(url)}: must not contain a user or a password, because a run writes the address to its config; "
            "use a signed address that expires, or store the credentials in fsspec's configuration"
        )


def expand(pattern: str) -> list[str]:
    """The addresses of a pattern with {000..099} and {a,b}, in order; leading zeros are kept.

    >>> expand("s3://b/{train,val}-{8..10}.tar")[:3]
    ['s3://b/train-8.tar', 's3://b/train-9.tar', 's3://b/train-10.tar']
    """
    parts = _BRACES.split(pattern)
    choices = [[part] if number % 2 == 0 else _choices(part, pattern) for number, part in enumerate(parts)]
    count = math.prod(map(len, choices))
    if count > _MOST:
        raise DataError(f"{redacted(pattern)}: matches {count:,} addresses; at most {_MOST:,} are allowed")
    return ["".join(parts) for parts in product(*choices)]


def _choices(inner: str, pattern: str) -> list[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
    if span is None:
        if "," not in inner:
            raise DataError(f"{redacted(pattern)}: {{{inner}}} must be {{000..099}} or {{a,b}}")
        return inner.split(",")
    first, last = int(span[1]), int(span[2])
    if last < first or last - first >= _MOST:
        raise DataError(f"{redacted(pattern)}: {{{inner}}} must count upwards, over at most {_MOST:,} numbers")
    width = len(span[1]) if len(span[1]) == len(span[2]) or span[1].startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


T = TypeVar("T")
TRIES = 6
PAUSE = 0.5  # seconds before the second try; twice as long before each further one
PIECE = 8 << 20  # bytes of a request
_CHUNK = 1 << 20  # bytes read from a response at a time
_GONE = {404, 410}
_FINAL = {400, 401, 403, 405, 416, 451} | _GONE
_TIMEOUT = 60.0  # seconds without a byte
_MARKS = ("ETag", "etag", "VersionId", "blob_id", "LastModified", "last_modified", "mtime")
_HUB = "hf://"
_hub_files: dict[tuple[int, int], Any] = {}
"""The Hugging Face hub's file system of a process and thread: a new one asks for the repository again."""


class RemoteError(DataError):
    """The server cannot be reached, or does not send what it should. No sample is to blame."""


class State(NamedTuple):
    """The state of a file on its server. version: a mark that changes when the file does; "" where it has none. sha256:
    where the server lists it, as the Hugging Face hub does."""

    size: int
    version: str
    sha256: str = ""


def state_of(url: str) -> State:
    """Size and version of a file."""

    def ask() -> State:
        if _is_web(url):
            return _web_state(url)
        files, path = _files(url)
        files.invalidate_cache()
        info = files.info(path)
        if info.get("size") is None:
            raise RemoteError(f"{redacted(url)}: the server does not give the length of the file")
        marks = (info.get(key) for key in _MARKS)
        large = info.get("lfs") or {}
        sha256 = large.get("sha256") if isinstance(large, dict) else getattr(large, "sha256", None)
        return State(int(info["size"]), next((str(mark) for mark in marks if mark), ""), str(sha256 or ""))

    return with_retries(url, ask)


def read_whole(url: str, most: int = 64 << 20) -> bytes:
    """A small file."""
    return with_retries(url, lambda: _web_whole(url, most) if _is_web(url) else _cat(url, 0, most))


def read_pieces(url: str, start: int, end: int) -> Iterator[bytes]:
    """The bytes from `start` to before `end`, piece by piece; a later call can resume anywhere."""
    pieces: Iterator[bytes] = iter(())

    def ask() -> bytes:
        nonlocal pieces
        if (piece := next(pieces, None)) is None:
            pieces = _request(url, start, end)
            piece = next(pieces)
        return piece

    while start < end:
        data = with_retries(url, ask)
        start += len(data)
        yield data


def _request(url: str, start: int, end: int) -> Iterator[bytes]:
    """The next piece; from a server without ranges all of them, because it would begin at the beginning each time."""
    stop = min(end, start + PIECE)
    if not _is_web(url):
        yield _exactly(_cat(url, start, stop), stop - start)
        return
    with _web(url, f"{start}-{stop - 1}") as response:
        if response.status == 206:
            sent = response.headers.get("Content-Range") or ""
            if sent.partition("/")[0] != f"bytes {start}-{stop - 1}":
                raise OSError(
                    f"the server sent {sent or 'other bytes'} instead of the requested bytes {start}-{stop - 1}"
                )
            while start < stop:  # what came before a cut is not requested again
                data = response.read(min(_CHUNK, stop - start)) or _exactly(b"", stop - start)
                start += len(data)
                yield data
            return
        skipped = 0
        while skipped < start:
            skipped += len(_exactly(response.read(size := min(PIECE, start - skipped)), size))
        while start < end:
            yield _exactly(response.read(size := min(PIECE, end - start)), size)
            start += size


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise OSError(f"{len(data):,} bytes were received instead of {size:,}")
    return data


def list_folder(url: str) -> list[str]:
    """The addresses of the files in a folder of an object store; none where there is no such folder."""

    def ask() -> list[str]:
        files, path = _files(url)
        try:
            entries = files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(files.unstrip_protocol(entry["name"]) for entry in entries if entry["type"] == "file")

    return with_retries(url, ask)


def with_retries(url: str, ask: Callable[[], T]) -> T:
    """The result of `ask`, at the first try that succeeds."""
    tries = 1 if url.startswith(_HUB) else TRIES  # its client tries again itself
    for number in range(1, tries + 1):
        try:
            return ask()
        except SitusError:
            raise
        except Exception as error:  # each scheme's library has classes of its own
            if number == tries or not _is_temporary(error):
                raise RemoteError(f"{redacted(url)}: cannot be fetched ({_reason(error)})") from error
            time.sleep(PAUSE * 2 ** (number - 1))
    raise AssertionError("the last try returns or raises")


def _is_temporary(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status not in _FINAL
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        return _is_temporary(error.reason)
    return not isinstance(error, FileNotFoundError | PermissionError | NotImplementedError | ImportError | ValueError)


def status_of(error: BaseException | None) -> int | None:
    """The status that a server has answered with, where an error is such an answer."""
    response = getattr(error, "response", None)
    marks = (getattr(error, "status", None), getattr(error, "code", None), getattr(response, "status_code", None))
    return next((mark for mark in marks if isinstance(mark, int)), None)


def _reason(error: Exception) -> str:
    status = status_of(error)
    if isinstance(error, FileNotFoundError) or status in _GONE:
        return "no such file"
    if status is not None:
        return f"its server answers {status}{': the file ends before the requested bytes' if status == 416 else ''}"
    if isinstance(error, URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    return redacted(first_line(error))


def _files(url: str) -> tuple[Any, str]:
    """fsspec's file system for an address, never one that a forked process inherits."""
    try:
        import fsspec
    except ImportError:
        raise missing_extra("fsspec", "remote", f"reading {redacted(url)}") from None
    place = (os.getpid(), threading.get_ident())
    if url.startswith(_HUB) and place in _hub_files:
        return _hub_files[place], url.removeprefix(_HUB)
    try:
        files, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        if url.startswith(_HUB):
            _hub_files[place] = files
        return files, path
    except ImportError as error:
        raise DataError(f"reading {redacted(url)} needs another package: {error}") from None
    except ValueError as error:
        raise DataError(f"{redacted(url)}: cannot be read ({error})") from None


def _cat(url: str, start: int, end: int) -> bytes:
    files, path = _files(url)
    return files.cat_file(path, start=start, end=end)


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _web(url: str, span: str = "") -> Any:
    headers = {"User-Agent": "situs", "Accept-Encoding": "identity"} | ({"Range": f"bytes={span}"} if span else {})
    return urlopen(Request(url, headers=headers), timeout=_TIMEOUT)  # noqa: S310  (http and https alone)


def _web_state(url: str) -> State:
    """Read by a request of one byte: an address that is signed for reading allows nothing else."""
    with _web(url, "0-0") as response:
        total = (response.headers.get("Content-Range") or "").rpartition("/")[2]
        size = total if response.status == 206 else response.headers.get("Content-Length") or ""
        if not size.isdigit():
            raise RemoteError(f"{redacted(url)}: the server does not give the length of the file")
        return State(int(size), response.headers.get("ETag") or response.headers.get("Last-Modified") or "")


def _web_whole(url: str, most: int) -> bytes:
    with _web(url) as response:
        data = response.read(most + 1)
        if len(data) > most:
            raise RemoteError(f"{redacted(url)}: is longer than {most:,} bytes")
        if response.length:
            raise OSError(f"{response.length:,} bytes are missing")
        return data


class RangedFile(io.RawIOBase):
    """A remote file of which small parts are read, such as the footer of a parquet file."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self._at = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self.size if count is None or count < 0 else min(self.size, self._at + count)
        data = b"".join(read_pieces(self.url, self._at, end)) if end > self._at else b""
        self._at += len(data)
        return data
