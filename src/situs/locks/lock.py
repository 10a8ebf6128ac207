"""Locking a model's folder with a key, and opening it again: file by file, tensor by tensor, bit for bit.

    lock(folder, key, out)       the residual channels of every block permuted, manifest.json beside them
    unlock(locked, key, out)     the very files that were locked

A lock is obfuscation, not encryption: whoever has the base model can match the columns (`situs audit lock` measures
it). `seal=True` encrypts the files at rest as well; the manifest, with names, shapes and hashes, stays readable.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from situs import __version__
from situs.backbones.base import Backbone
from situs.core.permutation import compose
from situs.errors import SitusError
from situs.locks import folder as files
from situs.locks import shards
from situs.locks.groups import axis_index, groups_of, invert_keys, residual_only
from situs.locks.key import Key, derive
from situs.locks.manifest import (
    NAME,
    VERSION,
    Entry,
    Manifest,
    fingerprint_of,
    layout_of,
    permutations_of,
    read_manifest,
    write_manifest,
)
from situs.locks.members import Group
from situs.locks.seal import SUFFIX, sealed_source, sealing_sink
from situs.locks.shards import Change, Sink, Source, Spec


@dataclass(frozen=True)
class Result:
    """What was written. notes: what its owner must know, one sentence each."""

    path: Path
    manifest: Manifest
    notes: list[str] = field(default_factory=list)


# --- lock ---------------------------------------------------------------------------------------------------


def lock(
    source: str | Path | Backbone,
    key: Key,
    out: str | Path,
    *,
    groups: Literal["residual", "all"] = "residual",
    seal: bool = False,
) -> Result:
    """Locks a model's folder (timm's or transformers', one file or shards), or a backbone, into the new folder `out`.

    groups: "residual" is the lock; "all" also moves MLP units, heads and their channels, which leaves the function
    as it was and only hinders the matching of weights. seal: encrypt every file at rest with the same key.
    """
    if isinstance(source, Backbone):
        with tempfile.TemporaryDirectory() as place:
            files.write_model(source, Path(place))
            return lock(place, key, out, groups=groups, seal=seal)
    folder = files.check_source(source)
    weights = files.weight_files(folder)
    others = files.other_files(folder, weights)
    for name in others:
        if files.may_hold_weights(name):
            raise SitusError(f"{source}: {name} may hold the weights in clear beside the lock: take it out first")
        if name == NAME or name.endswith(SUFFIX):
            raise SitusError(f"{source}: holds {name}: it is locked already, or that name is in the lock's way")
    headers = {name: _header(folder, name) for name in weights}
    specs = all_specs(headers, folder)
    backbone = files.structure_of(folder)
    moved = _groups_in_files(backbone, specs, groups)
    stamps = _stamps(folder, weights)
    clear: dict[str, str] = {}
    for name in weights:
        clear |= shards.digests(folder / name, headers[name])
    layout, lock_id = layout_of(specs.values()), secrets.token_hex(16)
    fingerprint = fingerprint_of(layout, clear)
    changes = changes_of(moved, derive(key, moved, fingerprint, lock_id), specs)
    keep = key if seal else None

    with files.new_folder(out) as aside:
        locked: dict[str, str] = {}
        for name in weights:
            with shards.plain_source(folder / name) as reader, _sink(aside, name, keep, lock_id) as writer:
                locked |= shards.rewrite(reader, writer, shards.read_header(reader, name), changes)
        if _stamps(folder, weights) != stamps:
            raise SitusError(f"{source}: its weights changed while they were being locked")
        copied = {}
        for name in others:
            with shards.plain_source(folder / name) as reader, _sink(aside, name, keep, lock_id) as writer:
                copied[name] = shards.copy(reader, writer)
        manifest = Manifest(
            version=VERSION,
            situs=__version__,
            model=backbone.name,
            key_id=key.id,
            lock_id=lock_id,
            sealed=seal,
            layout=layout,
            fingerprint=fingerprint,
            groups=moved,
            shards={name: headers[name].digest for name in weights},
            tensors={name: Entry(spec.dtype, spec.shape, locked[name]) for name, spec in specs.items()},
            files=copied,
        )
        manifest = write_manifest(aside, manifest, key)
    return Result(Path(out), manifest)


def _groups_in_files(backbone: Backbone, specs: Mapping[str, Spec], which: str) -> tuple[Group, ...]:
    """The groups that move, under the names that the tensors have in the files; every one of them must be there."""
    if which not in ("residual", "all"):
        raise SitusError(f"groups={which!r}: must be 'residual' or 'all' (--cover)")
    groups = groups_of(backbone)
    names = files.names_in_file(backbone, specs)
    for group in groups:
        for member in group.members:
            if member.tensor not in names:
                raise SitusError(
                    f"the files hold no {member.tensor} of the shape that {backbone.name} has: nothing can be locked "
                    "by halves"
                )
    return rename(residual_only(groups) if which == "residual" else groups, names)


def rename(groups: Sequence[Group], names: Mapping[str, str]) -> tuple[Group, ...]:
    """The same groups over tensors of other names."""
    return tuple(
        replace(group, members=tuple(replace(member, tensor=names[member.tensor]) for member in group.members))
        for group in groups
    )


def changes_of(groups: Sequence[Group], keys: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> dict[str, Change]:
    """What the keys do to each tensor: name -> function. Keys of one axis are composed, so that it is moved once."""
    moves: dict[str, dict[tuple[int, tuple[int, int] | None], Tensor]] = {}
    for group in groups:
        for member in group.members:
            index = axis_index(member, group.size, specs[member.tensor].shape[member.axis], keys[group.name])
            own, place = moves.setdefault(member.tensor, {}), (member.axis, member.at)
            own[place] = compose(own[place], index) if place in own else index
    return {name: _mover([(*place, index.numpy()) for place, index in own.items()]) for name, own in moves.items()}


def _mover(moves: Sequence[tuple[int, tuple[int, int] | None, np.ndarray]]) -> Change:
    """numpy's take on whole numbers moves the columns of bfloat16 four times as fast as torch's index_select."""

    def change(values: np.ndarray) -> np.ndarray:
        for axis, at, index in moves:
            if at is None:
                values = values.take(index, axis=axis)
            else:
                # One slice of a table moves; the axis that picks it is gone inside the slice.
                values = values.copy()
                inside = (slice(None),) * at[0] + (at[1],)
                values[inside] = values[inside].take(index, axis=axis - (axis > at[0]))
        return values

    return change


# --- unlock -------------------------------------------------------------------------------------------------


def unlock(locked: str | Path, key: Key, out: str | Path, *, retrained: bool = False) -> Result:
    """Opens a locked folder into the new folder `out`: the files that were locked, bit for bit.

    The manifest is checked first, each tensor as it is read, the whole at the end; `out` appears when all was right.
    retrained: take tensors that training has changed since; those that the key moves must have their old layout.
    """
    folder = Path(locked)
    manifest = read_manifest(folder, key)
    if retrained:
        return _unlock_retrained(folder, manifest, key, out)
    with files.new_folder(out) as aside:
        _open(folder, manifest, key, aside)
    return Result(Path(out), manifest)


def check(locked: str | Path, key: Key) -> Manifest:
    """Reads a locked folder through and refuses it unless it is, byte for byte, what was locked with this key."""
    manifest = read_manifest(Path(locked), key)
    _open(Path(locked), manifest, key, None)
    return manifest


def _open(folder: Path, manifest: Manifest, key: Key, out: Path | None) -> None:
    """Opens every file into `out`; None: only checks them. Refuses what is not as the manifest says."""
    changes = _openers(manifest, key)
    clear: dict[str, str] = {}
    for name, digest in manifest.shards.items():
        with _source(folder, name, manifest, key) as reader, _sink(out, name) as writer:
            header = shards.read_header(reader, name)
            if header.digest != digest:
                raise SitusError(
                    f"{folder}: {name} is of another model, or was altered: its header is not the locked one"
                )
            clear |= shards.rewrite(
                reader, writer, header, changes, lambda spec, got: _same(folder, manifest, spec, got)
            )
    for name, digest in manifest.files.items():
        with _source(folder, name, manifest, key) as reader, _sink(out, name) as writer:
            if shards.copy(reader, writer) != digest:
                raise SitusError(f"{folder}: {name} was altered since it was locked")
    if fingerprint_of(manifest.layout, clear) != manifest.fingerprint:
        raise SitusError(f"{folder}: what the key opens is not the model that was locked")


def _openers(manifest: Manifest, key: Key) -> dict[str, Change]:
    keys = invert_keys(permutations_of(manifest, key))
    return changes_of(manifest.groups, keys, {spec.name: spec for spec in manifest.specs()})


def _same(folder: Path, manifest: Manifest, spec: Spec, digest: str) -> None:
    if spec.name not in manifest.tensors or manifest.tensors[spec.name].sha256 != digest:
        raise SitusError(
            f"{folder}: {spec.name} is not the tensor that was locked: the file was altered, or is of another model; "
            "after authorised training: --retrained"
        )


def _unlock_retrained(folder: Path, manifest: Manifest, key: Key, out: str | Path) -> Result:
    if manifest.sealed:
        raise SitusError(f"{folder}: is sealed, so nobody trained it since: unlock it without --retrained")
    weights = files.weight_files(folder)
    specs = all_specs({name: _header(folder, name) for name in weights}, folder)
    old = {spec.name: spec for spec in manifest.specs()}
    for name in sorted(manifest.keyed()):
        if specs.get(name) != old[name]:
            now = "is not there" if name not in specs else f"is {specs[name].dtype} {list(specs[name].shape)}"
            raise SitusError(
                f"{folder}: {name} {now}, locked was {old[name].dtype} {list(old[name].shape)}: the key fits the "
                "layout that was locked, and no other (--retrained)"
            )
    changes = _openers(manifest, key)
    changed: set[str] = set()

    def compare(spec: Spec, digest: str) -> None:
        if spec.name not in old or manifest.tensors[spec.name].sha256 != digest:
            changed.add(spec.name)

    left = []
    with files.new_folder(out) as aside:
        for name in weights:
            with shards.plain_source(folder / name) as reader, _sink(aside, name) as writer:
                shards.rewrite(reader, writer, shards.read_header(reader, name), changes, compare)
        for name in files.other_files(folder, [*weights, NAME]):
            if files.may_hold_weights(name):
                left.append(name)
                continue
            with shards.plain_source(folder / name) as reader, _sink(aside, name) as writer:
                shards.copy(reader, writer)
    notes = [
        f"{len(changed)} of {len(specs)} tensors are not those that were locked: accepted as retrained, unchecked."
    ]
    if other := sorted(name for name in specs.keys() | old.keys() if specs.get(name) != old.get(name)):
        notes.append(f"Clear tensors that are new, gone or of another shape: {', '.join(other)}.")
    if left:
        notes.append(f"Left behind, as they may hold locked weights: {', '.join(left)}.")
    return Result(Path(out), manifest, notes)


# --- files --------------------------------------------------------------------------------------------------


def all_specs(headers: Mapping[str, shards.Header], folder: Path) -> dict[str, Spec]:
    """The tensors of all shards by name; one that stands in two shards is refused."""
    found: dict[str, Spec] = {}
    for header in headers.values():
        for spec in header.tensors:
            if spec.name in found:
                raise SitusError(f"{folder}: {spec.name} stands in two of its weight files")
            found[spec.name] = spec
    return found


def _stamps(folder: Path, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """What tells a file that was written to from one that was not."""
    return [(found.st_ino, found.st_size, found.st_mtime_ns) for found in ((folder / name).stat() for name in names)]


def _header(folder: Path, name: str) -> shards.Header:
    with shards.plain_source(folder / name) as reader:
        return shards.read_header(reader, str(folder / name))


@contextmanager
def _sink(folder: Path | None, name: str, seal: Key | None = None, lock_id: str = "") -> Iterator[Sink | None]:
    """A new file in `folder`, encrypted where a key is given to seal it; None where nothing is written."""
    if folder is None:
        yield None
        return
    path = folder / (name if seal is None else name + SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        if seal is None:
            yield file
        else:
            with sealing_sink(file, seal, lock_id, name) as sealing:
                yield sealing


@contextmanager
def _source(folder: Path, name: str, manifest: Manifest, key: Key) -> Iterator[Source]:
    """A file of a locked folder, decrypted where it is sealed."""
    path = folder / (name + SUFFIX if manifest.sealed else name)
    if not path.is_file():
        raise SitusError(f"{folder}: {path.name} is missing")
    if manifest.sealed:
        with sealed_source(path, key, manifest.lock_id, name) as source:
            yield source
    else:
        with shards.plain_source(path) as source:
            yield source


def unseal(locked: Path, manifest: Manifest, key: Key, out: Path) -> None:
    """Decrypts the files of a sealed folder into `out`; the weights in them stay locked."""
    for name in (*manifest.shards, *manifest.files):
        with _source(locked, name, manifest, key) as reader, _sink(out, name) as writer:
            shards.copy(reader, writer)
