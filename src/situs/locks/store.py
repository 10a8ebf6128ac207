"""The files of a lock as streams: in the clear folder, in the locked one, and the owner's second file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from situs.errors import SitusError
from situs.locks import shards
from situs.locks.key import Codes, Key, codes_of
from situs.locks.manifest import Manifest
from situs.locks.seal import SUFFIX, sealed_source, sealing_sink
from situs.locks.shards import Header, Sink, Source, Spec
from situs.locks.withhold import NAME as SECOND
from situs.locks.withhold import missing, original_headers
from situs.train.storage import sync


def all_specs(headers: Mapping[str, Header], folder: Path) -> dict[str, Spec]:
    """The tensors of all shards by name; one that stands in two shards is refused."""
    found: dict[str, Spec] = {}
    for header in headers.values():
        for spec in header.tensors:
            if spec.name in found:
                raise SitusError(f"{folder}: {spec.name} stands in two of its weight files")
            found[spec.name] = spec
    return found


def header_of(folder: Path, name: str) -> Header:
    """The header of a weight file."""
    with shards.plain_source(folder / name) as reader:
        return shards.read_header(reader, str(folder / name))


def stamps(folder: Path, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """What tells a file that was written to from one that was not."""
    return [(found.st_ino, found.st_size, found.st_mtime_ns) for found in ((folder / name).stat() for name in names)]


@contextmanager
def sink(
    folder: Path | None, name: str, seal: Key | None = None, lock_id: str = "", *, private: bool = False
) -> Iterator[Sink | None]:
    """A new file in `folder`, encrypted where a key is given to seal it; None where nothing is written.

    private: readable by its owner alone from the first byte on.
    """
    if folder is None:
        yield None
        return
    path = folder / (name if seal is None else name + SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666), "wb") as file:
        if seal is None:
            yield file
        else:
            with sealing_sink(file, seal, lock_id, name) as sealing:
                yield sealing


@contextmanager
def source(folder: Path, name: str, manifest: Manifest, key: Key) -> Iterator[Source]:
    """A file of a locked folder, decrypted where it is sealed."""
    path = folder / (name + SUFFIX if manifest.sealed else name)
    if not path.is_file():
        raise SitusError(f"{folder}: {path.name} is missing")
    with _reader(path, name, manifest, key) as reader:
        yield reader


@contextmanager
def _reader(path: Path, name: str, manifest: Manifest, key: Key) -> Iterator[Source]:
    if manifest.sealed:
        with sealed_source(path, key, manifest.lock_id, name) as reader:
            yield reader
    else:
        with shards.plain_source(path) as reader:
            yield reader


# --- the second file ----------------------------------------------------------------------------------------


@contextmanager
def second_sink(path: Path, header: Header, seal: Key | None, lock_id: str) -> Iterator[Sink]:
    """The owner's second file: mode 0600, complete or not there, and never in the place of another."""
    if path.exists() or path.is_symlink():
        raise SitusError(f"{path}: exists already, and what is withheld never replaces a file", field="withheld")
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if seal is None:
                file.write(header.raw)
                yield file
            else:
                with sealing_sink(file, seal, lock_id, SECOND) as sealing:
                    sealing.write(header.raw)
                    yield sealing
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)  # unlike a rename, it refuses to take the place of a file that is there
        sync(path.parent)
    except OSError as error:
        raise SitusError(
            f"{path}: could not be written: {(error.strerror or str(error)).lower()}", field="withheld"
        ) from error
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def second_source(
    folder: Path, manifest: Manifest, key: Key, path: Path | None
) -> Iterator[tuple[Source | None, Header | None, dict[str, Header]]]:
    """The second file of a lock behind its header, the header, and those of the clear files; nothing where none is.

    Refused unless it is the one that the manifest names.
    """
    withheld = manifest.withheld
    if withheld is None:
        if path is not None:
            raise SitusError(f"{path}: nothing was withheld from {folder}", field="withheld")
        yield None, None, {}
        return
    if path is None:
        raise missing(folder, withheld)
    if not path.is_file():
        raise SitusError(f"{path}: no such file, and {folder} cannot be opened without it", field="withheld")
    with _reader(path, SECOND, manifest, key) as reader:
        header = shards.read_header(reader, str(path))
        if codes_of(key, manifest.lock_id).of("header", SECOND, header.raw) != withheld.header:
            raise SitusError(f"{path}: is not what was withheld from {folder}, or was altered", field="withheld")
        yield reader, header, original_headers(header, str(path))


def tensor_codes(codes: Codes) -> shards.Start:
    """The code of a tensor, wherever it lies."""
    return lambda name: codes.start("tensor", name)
