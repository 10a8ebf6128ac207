"""Bytes of a remote file, by ranges and with retries.

Temporary failures (a cut connection, a 5xx, a timeout) are retried after a growing pause; permanent ones (no such file,
no permission) are one sentence at once. Web servers are read by Python's own client, which keeps no thread or
connection that a forked worker would inherit; every other scheme goes through fsspec.
"""

from __future__ import annotations

import io
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, TypeVar
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from situs.errors import DataError, SitusError, first_line, missing_extra

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
            f"{redacted(url)}: has a user or a password, which a run would write to its config; use a signed address, "
            "or fsspec's own configuration"
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
        raise DataError(f"{redacted(pattern)}: {{{inner}}} must increase, by less than {_MOST:,}")
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
            raise RemoteError(f"{redacted(url)}: its server does not give its length")
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
                raise OSError(f"bytes {start}-{stop - 1} were requested, but its server sent {sent or 'others'}")
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
        raise OSError(f"{len(data):,} bytes received where {size:,} were asked for")
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
            raise RemoteError(f"{redacted(url)}: its server does not give its length")
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
