"""The shards of a remote set: their addresses, sizes and versions, before they are fetched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from situs.data.sources.base import SPLIT_WORDS
from situs.data.sources.manifest import CLASSES, MANIFEST, parse_manifest
from situs.data.sources.remote.transfer import (
    RemoteError,
    check_address,
    expand,
    list_folder,
    read_whole,
    redacted,
    state_of,
    status_of,
)
from situs.errors import DataError

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
            f"{redacted(address)}: must name shards (…/train-{{000..099}}.tar, .parquet) or the folder of a packed set "
            f"with its {MANIFEST}: a web server does not list its files"
        )
    folders = [folder, f"{folder}/data", *(f"{folder}/{word}" for word in SPLIT_WORDS)]  # as for local shards
    urls = [url for place in folders for url in list_folder(place) if url.endswith(SHARDS)]
    if not urls:
        raise DataError(f"{redacted(address)}: holds no parquet or tar files")
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
