"""Locking a model's folder with a key, and opening it again: file by file, tensor by tensor, bit for bit.

    lock(model, key, out)        the residual channels of every block permuted, manifest.json beside them
    unlock(locked, key, out)     the very files that were locked

A lock is obfuscation, not encryption: whoever has the base model can match the columns (`situs audit lock` measures
it). `withhold` leaves parts in a second file for the owner. `seal=True` encrypts the files at rest as well; the
manifest, with names and shapes, stays readable.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from situs import __version__
from situs.errors import SitusError
from situs.locks import folder as files
from situs.locks import shards
from situs.locks.certify import certify_folder
from situs.locks.contents import TABLE, check_tensors, sort_files
from situs.locks.groups import changes_of, rename, residual_only
from situs.locks.key import AnyKey, Codes, Key, as_key, codes_of, derive
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
from situs.locks.seal import SUFFIX, locked_file, new_file
from situs.locks.shards import Change, Header, Sink, Spec
from situs.locks.withhold import NAME as SECOND
from situs.locks.withhold import beside, new_second, open_second, parse_parts, second_header, tensors_of, words
from situs.models import Model, open_model
from situs.models.data import AnyModel
from situs.models.export import export_run
from situs.results import percent
from situs.train.run import is_run


@dataclass(frozen=True)
class Written(os.PathLike[str]):
    """A folder that was written, locked or opened, and what was locked.

    said: what it is, a sentence each; printed, it says them. notes: those of them that depend on what was found.
    withheld: the owner's second file, where parts were withheld.
    """

    path: Path
    manifest: Manifest
    said: Sequence[str]
    notes: Sequence[str] = ()
    withheld: Path | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return "\n".join(self.said)


def _sentences(out: Path, manifest: Manifest, notes: Sequence[str]) -> Iterator[str]:
    """What is said of a model that was locked."""
    yield f"{out}: {manifest.model} locked with the key {manifest.key_id}."
    yield _shares(manifest)
    yield from notes
    if manifest.sealed:
        yield "Every file but manifest.json is encrypted with the same key; the manifest shows names and shapes."
    yield (
        "A lock is obfuscation, not encryption: whoever has the model it was made from can match the columns and find "
        f"the key. situs audit lock {out} measures what that takes."
    )


def _shares(manifest: Manifest) -> str:
    """How much of the model moved, how much is withheld, and what is clear."""
    held, keyed, total = manifest.held(), manifest.keyed(), manifest.count(manifest.tensors)
    residual = [str(group.size) for group in residual_only(manifest.groups)]
    inner = len(manifest.groups) - len(residual)
    cover = f" and {inner} inner groups as cover" if inner else ""
    moved = percent(manifest.count(keyed - held) / total)
    said = (
        f"{len(keyed - held)} of {len(manifest.tensors)} tensors moved, {moved} of the parameters: "
        f"{' + '.join(residual)} residual channels{cover}."
    )
    parts = () if manifest.withheld is None else manifest.withheld.parts
    if parts:
        share = percent(manifest.count(held) / total)
        said += f" Withheld in the second file, mode 0600: {words(parts)}, {share} of the parameters."
    return f"{said} {'Final' if 'embedding' in parts else 'Embedding, positions, final'} norm and head are clear."


def lock(
    source: AnyModel,
    key: AnyKey,
    out: str | Path,
    *,
    cover: bool = False,
    seal: bool = False,
    withhold: str | Sequence[str] = (),
    withheld: str | Path | None = None,
    **opening: Any,
) -> Written:
    """Locks a model with a key into the new folder `out`; `unlock` restores its files bit for bit.

    source: a model's folder (an export, timm's or transformers', one file or shards), a run, a timm name with
    `weights`, a model that is open, a module of transformers. cover: also move MLP units, heads and their channels,
    which leaves the function as it was and only hinders the matching of weights. seal: encrypt every file at rest with
    the same key. withhold: "embedding", "blocks=K" or both: these parts are not in `out` but in the file
    `withheld` (default: beside `out`). opening: what `situs.models.open_model` takes for a name, and `ema` for a run.

    >>> situs.lock("exported", situs.new_key("owner.key"), "locked")
    """
    parts, key = parse_parts(withhold), as_key(key)
    if withheld is not None and not parts:
        raise SitusError(f"withheld={withheld}: nothing is withheld; say which parts to withhold", field="withhold")
    with _model_folder(source, {name: value for name, value in opening.items() if value is not None}) as folder:
        return _lock_folder(folder, key, Path(out), cover, seal, parts, None if withheld is None else Path(withheld))


@contextmanager
def _model_folder(source: AnyModel, opening: dict[str, Any]) -> Iterator[Path]:
    """A model's folder as it is, a run as the folder that its export is, another model as its library writes it."""
    place = None if isinstance(source, nn.Module | Model) else Path(os.fspath(source).removeprefix("hf:"))
    with tempfile.TemporaryDirectory() as aside:
        if place is None or not place.exists():
            known = isinstance(source, nn.Module)
            opened = files.backbone_of(source, **opening) if known else open_model(source, **opening)
            if isinstance(opened, Model) and opened.locked:
                raise SitusError(f"{opened.name}: is locked already; open it with its key first")
            files.write_model(opened, Path(aside))
            yield Path(aside)
            return
        ema = opening.pop("ema", None)
        for name, value in opening.items():
            raise SitusError(f"{name}={value}: a model's folder has its own", field=name)
        yield export_run(place, Path(aside) / "export", ema=ema).path if is_run(place) else place


def _lock_folder(
    folder: Path, key: Key, out: Path, cover: bool, seal: bool, parts: tuple[str, ...], withheld: Path | None
) -> Written:
    if not (folder / files.CONFIG).is_file():
        raise SitusError(f"{folder}: no model with weights: a lock needs a folder with a config.json and safetensors")
    weights = files.weight_files(folder)
    for name in sorted(path.name for path in folder.iterdir()):
        if name == NAME or name.endswith(SUFFIX):
            raise SitusError(f"{folder}: holds {name}: it is locked already, or that name is in the lock's way")
    others, left_out = sort_files(folder, weights)
    headers = {name: files.header_of(folder, name) for name in weights}
    specs = files.all_specs(headers, folder)
    backbone = files.structure_of(folder)
    names = files.names_in_file(backbone, specs)
    moved = rename(backbone.groups(), names)
    moved = moved if cover else residual_only(moved)
    strangers = check_tensors(backbone, specs, names, residual_only(moved))
    if parts and TABLE in others:
        said = f"{backbone.name}: its position table is a file of its own, so no part is withheld"
        raise SitusError(said, field="withhold")
    held = {names[own] for own in tensors_of(backbone, parts) if own in names}
    stamps, lock_id = files.stamps(folder, weights), secrets.token_hex(16)
    codes = codes_of(key, lock_id)
    clear: dict[str, str] = {}
    for name in weights:
        clear |= shards.codes_of(folder / name, headers[name], codes.tensor)
    layout = layout_of(specs.values())
    fingerprint = fingerprint_of(codes, layout, clear)
    keys = derive(key, moved, fingerprint, lock_id)
    certify_folder(folder, backbone, rename(moved, {name: own for own, name in names.items()}), keys)
    changes = changes_of(moved, keys, {name: spec.shape for name, spec in specs.items()})
    keep, second = key if seal else None, second_header(headers, held, lock_id)
    beyond = (withheld or beside(out)) if parts else None

    with ExitStack() as opened:
        aside = opened.enter_context(files.new_folder(out))
        apart = None if beyond is None else opened.enter_context(new_second(beyond, second, keep, lock_id))
        create = partial(new_file, aside, seal=keep, lock_id=lock_id)
        locked: dict[str, str] = {}
        for name, header in headers.items():
            with shards.plain_source(folder / name) as reader, create(name) as writer:
                locked |= _lock_shard(reader, writer, apart, header, held, changes, codes)
        if files.stamps(folder, weights) != stamps:
            raise SitusError(f"{folder}: its weights changed during locking")
        copied = {}
        for name in others:
            with shards.plain_source(folder / name) as reader, create(name) as writer:
                copied[name] = shards.copy(reader, writer, codes.start("file", name))
        withheld_header = codes.of("header", SECOND, second.raw)
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
            withheld=Withheld(parts, tuple(s.name for s in second.tensors), withheld_header) if parts else None,
        )
        manifest = write_manifest(aside, manifest, key)
    found = {
        "Left out, for a lock takes known small files only": left_out,
        "Clear in the weight file, though the model has no place for them": strangers,
    }
    notes = [f"{said}: {', '.join(names)}." for said, names in found.items() if names]
    return Written(out, manifest, [*_sentences(out, manifest, notes)], notes, beyond)


def _lock_shard(
    reader: shards.PlainSource,
    writer: Sink | None,
    apart: Sink | None,
    header: Header,
    held: set[str],
    changes: Mapping[str, Change],
    codes: Codes,
) -> dict[str, str]:
    """Writes a weight file less what is withheld, which goes to `apart`; the codes of its tensors."""
    assert writer is not None
    reader.seek(len(header.raw))
    writer.write(header.without(held).raw)

    def into(spec: Spec) -> Sink:
        return apart if apart is not None and spec.name in held else writer

    return shards.rewrite(lambda _: reader, into, header.tensors, changes, codes.tensor)


def unlock(
    locked: str | os.PathLike[str],
    key: AnyKey,
    out: str | Path,
    *,
    retrained: bool = False,
    withheld: str | Path | None = None,
) -> Written:
    """Opens a locked folder with its key into the new folder `out`: the original files, bit for bit.

    The manifest is checked first, each tensor as it is read, the whole at the end; `out` appears when all was right.
    retrained: take tensors that training has changed since; those that the key moves must have their old layout.
    withheld: the second file, where parts were withheld.

    >>> situs.unlock("locked", "owner.key", "opened")
    """
    folder, key = Path(locked), as_key(key)
    manifest = read_manifest(folder, key)
    if retrained:
        notes = unlock_retrained(folder, manifest, key, out, withheld)
        return Written(Path(out), manifest, [f"{out}: {manifest.model}, opened as retrained.", *notes], notes)
    with files.new_folder(out) as aside:
        _open(folder, manifest, key, aside, withheld)
    said = f"{out}: {manifest.model}, {len(manifest.tensors)} tensors, bit for bit as they were before the lock."
    return Written(Path(out), manifest, [said])


def check(locked: str | Path, key: Key, withheld: str | Path | None = None) -> Manifest:
    """Reads a locked folder through and refuses it unless it is, byte for byte, what was locked with this key."""
    manifest = read_manifest(Path(locked), key)
    _open(Path(locked), manifest, key, None, withheld)
    return manifest


@contextmanager
def readable(locked: Path, manifest: Manifest, key: Key | None, withheld: str | Path | None = None) -> Iterator[Path]:
    """A folder whose files are plain and whose weights stay locked: the very one, unless it is sealed or lacks parts.

    withheld: the second file, to put what was withheld back; None leaves it out, as the folder does.
    """
    if not manifest.sealed and withheld is None:
        yield locked
        return
    assert key is not None
    with tempfile.TemporaryDirectory() as place:
        _open(locked, manifest, key, Path(place), withheld, keyed=True)
        yield Path(place)


def _open(
    folder: Path,
    manifest: Manifest,
    key: Key,
    out: Path | None,
    withheld: str | Path | None,
    *,
    keyed: bool = False,
) -> None:
    """Opens every file into `out`; None: only checks them. Refuses what is not as the manifest says.

    keyed: leave the weights as they are locked.
    """
    codes, held = codes_of(key, manifest.lock_id), manifest.held()
    changes = {} if keyed else openers(manifest, key)
    clear: dict[str, str] = {}
    alone = keyed and withheld is None
    opened = nullcontext((None, None, {})) if alone else open_second(folder, manifest, key, withheld)
    with opened as (second, _, originals):
        for name, code in manifest.shards.items():
            with locked_file(folder, name, manifest, key) as reader, new_file(out, name, private=True) as writer:
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
                    codes.tensor,
                    lambda spec, got: _same(withheld if spec.name in held else folder, manifest, spec, got),
                )
    for name, code in manifest.files.items():
        with locked_file(folder, name, manifest, key) as reader, new_file(out, name, private=True) as writer:
            if shards.copy(reader, writer, codes.start("file", name)) != code:
                raise SitusError(f"{folder}: {name} was altered since it was locked")
    if not keyed and fingerprint_of(codes, manifest.layout, clear) != manifest.fingerprint:
        raise SitusError(f"{folder}: what the key opens is not the model that was locked")


def _same(where: str | Path | None, manifest: Manifest, spec: Spec, code: str) -> None:
    if spec.name not in manifest.tensors or manifest.tensors[spec.name].code != code:
        raise SitusError(
            f"{where}: {spec.name} is not the tensor that was locked: the file was altered, or is of another model; "
            "after authorised training it is opened as retrained",
            field="retrained",
        )
