"""Locking a model's folder with a key, and opening it again: file by file, tensor by tensor, bit for bit.

    lock(folder, key, out)       the residual channels of every block permuted, manifest.json beside them
    unlock(locked, key, out)     the very files that were locked

A lock is obfuscation, not encryption: whoever has the base model can match the columns (`situs audit lock` measures
it). `withhold` leaves parts in a second file for the owner. `seal=True` encrypts the files at rest as well; the
manifest, with names and shapes, stays readable.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from situs import __version__
from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.errors import SitusError
from situs.locks import folder as files
from situs.locks import shards, store
from situs.locks.certify import certify_folder
from situs.locks.contents import TABLE, check_tensors, sort_files
from situs.locks.groups import changes_of, rename, residual_only
from situs.locks.key import Key, codes_of, derive
from situs.locks.manifest import (
    NAME,
    VERSION,
    Entry,
    Manifest,
    Withheld,
    fingerprint_of,
    layout_of,
    openers,
    read_manifest,
    write_manifest,
)
from situs.locks.retrained import unlock_retrained
from situs.locks.seal import SUFFIX
from situs.locks.shards import Change, Header, Sink, Spec
from situs.locks.withhold import NAME as SECOND
from situs.locks.withhold import beside, parse_parts, second_header, tensors_of

__all__ = ["Result", "check", "lock", "unlock", "unseal"]


@dataclass(frozen=True)
class Result:
    """What was written. notes: what its owner must know, one sentence each. withheld: the second file."""

    path: Path
    manifest: Manifest
    notes: list[str] = field(default_factory=list)
    withheld: Path | None = None


# --- lock ---------------------------------------------------------------------------------------------------


def lock(
    source: str | Path | Backbone,
    key: Key,
    out: str | Path,
    *,
    groups: Literal["residual", "all"] = "residual",
    seal: bool = False,
    withhold: Sequence[str] = (),
    withheld: str | Path | None = None,
) -> Result:
    """Locks a model's folder (timm's or transformers', one file or shards), or a backbone, into the new folder `out`.

    groups: "residual" is the lock; "all" also moves MLP units, heads and their channels, which leaves the function
    as it was and only hinders the matching of weights. seal: encrypt every file at rest with the same key. withhold:
    "embedding", "blocks=K" or both: these parts are not in `out` but in the file `withheld` (default: beside `out`).
    """
    if isinstance(source, Backbone):
        with tempfile.TemporaryDirectory() as place:
            files.write_model(source, Path(place))
            return lock(place, key, out, groups=groups, seal=seal, withhold=withhold, withheld=withheld)
    parts, folder = parse_parts(withhold), files.check_source(source)
    if withheld is not None and not parts:
        raise SitusError(f"withheld={withheld}: there is nothing to write to it; say which parts (--withhold)")
    weights = files.weight_files(folder)
    _refuse_locked(folder)
    others, left_out = sort_files(folder, weights)
    headers = {name: store.header_of(folder, name) for name in weights}
    specs = store.all_specs(headers, folder)
    backbone = files.structure_of(folder)
    names = files.names_in_file(backbone, specs)
    moved = _groups_in_files(backbone, names, groups)
    strangers = check_tensors(backbone, specs, names, residual_only(moved))
    held = _held(backbone, parts, names, others)
    stamps, lock_id = store.stamps(folder, weights), secrets.token_hex(16)
    codes = codes_of(key, lock_id)
    clear: dict[str, str] = {}
    for name in weights:
        clear |= shards.codes_of(folder / name, headers[name], store.tensor_codes(codes))
    layout = layout_of(specs.values())
    fingerprint = fingerprint_of(codes, layout, clear)
    keys = derive(key, moved, fingerprint, lock_id)
    certify_folder(folder, backbone, rename(moved, {name: own for own, name in names.items()}), keys)
    changes = changes_of(moved, keys, {name: spec.shape for name, spec in specs.items()})
    keep, second = key if seal else None, second_header(headers, held, lock_id)
    beyond = None if not parts else Path(withheld) if withheld is not None else beside(out)

    with ExitStack() as opened:
        aside = opened.enter_context(files.new_folder(out))
        apart = None
        if beyond is not None:
            apart = opened.enter_context(store.second_sink(beyond, second, keep, lock_id))
        locked = _lock_shards(folder, headers, held, apart, changes, aside, keep, lock_id, store.tensor_codes(codes))
        if store.stamps(folder, weights) != stamps:
            raise SitusError(f"{source}: its weights changed while they were being locked")
        copied = {}
        for name in others:
            with shards.plain_source(folder / name) as reader, store.sink(aside, name, keep, lock_id) as writer:
                copied[name] = shards.copy(reader, writer, codes.start("file", name))
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
            shards={name: codes.of("header", name, headers[name].without(held).raw) for name in weights},
            tensors={name: Entry(spec.dtype, spec.shape, locked[name]) for name, spec in specs.items()},
            files=copied,
            withheld=None
            if not parts
            else Withheld(parts, tuple(s.name for s in second.tensors), codes.of("header", SECOND, second.raw)),
        )
        manifest = write_manifest(aside, manifest, key)
    return Result(Path(out), manifest, _notes(left_out, strangers), beyond)


def _lock_shards(
    folder: Path,
    headers: Mapping[str, Header],
    held: set[str],
    apart: Sink | None,
    changes: Mapping[str, Change],
    out: Path,
    keep: Key | None,
    lock_id: str,
    start: shards.Start,
) -> dict[str, str]:
    """Writes each weight file less what is withheld, which goes to `apart`; the codes of all tensors."""
    locked: dict[str, str] = {}
    for name, header in headers.items():
        with shards.plain_source(folder / name) as reader, store.sink(out, name, keep, lock_id) as writer:
            assert writer is not None
            whole = shards.read_header(reader, name)
            writer.write(header.without(held).raw)

            def into(spec: Spec, writer: Sink = writer) -> Sink:
                return apart if apart is not None and spec.name in held else writer

            locked |= shards.rewrite(lambda _, reader=reader: reader, into, whole.tensors, changes, start)
    return locked


def _refuse_locked(folder: Path) -> None:
    for name in sorted(path.name for path in folder.iterdir()):
        if name == NAME or name.endswith(SUFFIX):
            raise SitusError(f"{folder}: holds {name}: it is locked already, or that name is in the lock's way")


def _groups_in_files(backbone: Backbone, names: Mapping[str, str], which: str) -> tuple[Group, ...]:
    """The groups that move, under the names that the tensors have in the files; every one of them must be there."""
    if which not in ("residual", "all"):
        raise SitusError(f"groups={which!r}: must be 'residual' or 'all' (--cover)")
    groups = backbone.groups()
    for group in groups:
        for member in group.members:
            if member.tensor not in names:
                raise SitusError(
                    f"the files hold no {member.tensor} of the shape that {backbone.name} has: nothing can be locked "
                    "by halves"
                )
    return rename(residual_only(groups) if which == "residual" else groups, names)


def _held(backbone: Backbone, parts: Sequence[str], names: Mapping[str, str], others: Sequence[str]) -> set[str]:
    """The names in the files of the tensors that are withheld."""
    if parts and TABLE in others:
        raise SitusError(
            f"{backbone.name}: its position table is a file of its own, so no part is withheld (--withhold)"
        )
    return {names[own] for own in tensors_of(backbone, parts) if own in names}


def _notes(left_out: Sequence[str], strangers: Sequence[str]) -> list[str]:
    notes = []
    if left_out:
        notes.append(f"Left out, for a lock takes known small files only: {', '.join(left_out)}.")
    if strangers:
        notes.append(f"Clear in the weight file, though the model has no place for them: {', '.join(strangers)}.")
    return notes


# --- unlock -------------------------------------------------------------------------------------------------


def unlock(
    locked: str | Path, key: Key, out: str | Path, *, retrained: bool = False, withheld: str | Path | None = None
) -> Result:
    """Opens a locked folder into the new folder `out`: the files that were locked, bit for bit, mode 0600.

    The manifest is checked first, each tensor as it is read, the whole at the end; `out` appears when all was right.
    retrained: take tensors that training has changed since; those that the key moves must have their old layout.
    withheld: the second file, where parts were withheld.
    """
    folder, second = Path(locked), None if withheld is None else Path(withheld)
    manifest = read_manifest(folder, key)
    if retrained:
        return Result(Path(out), manifest, unlock_retrained(folder, manifest, key, out, second))
    with files.new_folder(out) as aside:
        _open(folder, manifest, key, aside, second)
    return Result(Path(out), manifest)


def check(locked: str | Path, key: Key, withheld: str | Path | None = None) -> Manifest:
    """Reads a locked folder through and refuses it unless it is, byte for byte, what was locked with this key."""
    manifest = read_manifest(Path(locked), key)
    _open(Path(locked), manifest, key, None, None if withheld is None else Path(withheld))
    return manifest


def unseal(locked: Path, manifest: Manifest, key: Key, out: Path, withheld: Path | None = None) -> None:
    """The files of a sealed folder, plain, in `out`; their weights stay locked.

    withheld: the second file, to put what was withheld back; None leaves it out, as the folder does.
    """
    _open(locked, manifest, key, out, withheld, keyed=True)


def _open(
    folder: Path, manifest: Manifest, key: Key, out: Path | None, withheld: Path | None, *, keyed: bool = False
) -> None:
    """Opens every file into `out`; None: only checks them. Refuses what is not as the manifest says.

    keyed: leave the weights as they are locked.
    """
    codes, held = codes_of(key, manifest.lock_id), manifest.held()
    changes = {} if keyed else openers(manifest, key)
    clear: dict[str, str] = {}
    alone = keyed and withheld is None
    opened = nullcontext((None, None, {})) if alone else store.second_source(folder, manifest, key, withheld)
    with opened as (second, _, originals):
        for name, code in manifest.shards.items():
            with store.source(folder, name, manifest, key) as reader, store.sink(out, name, private=True) as writer:
                header = shards.read_header(reader, name)
                if codes.of("header", name, header.raw) != code:
                    raise SitusError(
                        f"{folder}: {name} is of another model, or was altered: its header is not the locked one"
                    )
                header = originals.get(name, header)
                if writer is not None:
                    writer.write(header.raw)
                clear |= shards.rewrite(
                    lambda spec, reader=reader: second if second is not None and spec.name in held else reader,
                    None if writer is None else lambda _, writer=writer: writer,
                    header.tensors,
                    changes,
                    store.tensor_codes(codes),
                    lambda spec, got: _same(withheld if spec.name in held else folder, manifest, spec, got),
                )
    for name, code in manifest.files.items():
        with store.source(folder, name, manifest, key) as reader, store.sink(out, name, private=True) as writer:
            if shards.copy(reader, writer, codes.start("file", name)) != code:
                raise SitusError(f"{folder}: {name} was altered since it was locked")
    if not keyed and fingerprint_of(codes, manifest.layout, clear) != manifest.fingerprint:
        raise SitusError(f"{folder}: what the key opens is not the model that was locked")


def _same(where: Path | None, manifest: Manifest, spec: Spec, code: str) -> None:
    if spec.name not in manifest.tensors or manifest.tensors[spec.name].code != code:
        raise SitusError(
            f"{where}: {spec.name} is not the tensor that was locked: the file was altered, or is of another model; "
            "after authorised training: --retrained"
        )
