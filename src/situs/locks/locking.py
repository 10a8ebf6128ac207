"""Locking a model's folder with a key, and opening it again bit for bit.

    lock(model, key, out)        permutes the residual channels of every block and adds manifest.json
    unlock(locked, key, out)     gives back the files that were locked

A lock is obfuscation, not encryption: an attacker with the base model can match the channels (`situs audit lock`
measures it). `withhold` writes parts to a second file for the owner. `seal=True` also encrypts the files at rest; the
manifest, with names and shapes, stays readable.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from situs import __version__
from situs.config import checks_arguments
from situs.errors import SitusError
from situs.hub import hub_address, local_folder
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
from situs.locks.seal import SUFFIX, locked_file, new_file
from situs.locks.shards import ByteSource, Change, Header, PlainSource, Sink, Spec
from situs.locks.withhold import NAME as SECOND
from situs.locks.withhold import (
    default_path,
    described,
    new_second,
    open_second,
    parse_parts,
    second_header,
    tensors_of,
)
from situs.models import Model, open_model
from situs.models.data import AnyModel
from situs.models.export import export_run
from situs.results import percent
from situs.train.run import is_run


@dataclass(frozen=True)
class Written(os.PathLike[str]):
    """A locked or opened folder.

    sentences: what was done, which printing shows. notes: those of them that depend on the files. withheld: the
    owner's second file, if parts were withheld.
    """

    path: Path
    manifest: Manifest
    sentences: Sequence[str]
    notes: Sequence[str] = ()
    withheld: Path | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def _sentences(out: Path, manifest: Manifest, notes: Sequence[str]) -> Iterator[str]:
    """The sentences about a model that was locked."""
    yield f"{out}: {manifest.model} locked with the key {manifest.key_id}."
    yield _shares(manifest)
    yield from notes
    if manifest.sealed:
        yield (
            "Every file except manifest.json is encrypted with the key of the lock. The manifest shows names and "
            "shapes."
        )
    yield (
        "A lock is obfuscation, not encryption: an attacker with the original model can match the channels and "
        f"compute the key. The command `situs audit lock {out}` measures how easy this is."
    )


def _shares(manifest: Manifest) -> str:
    """How much of the model was permuted, how much is withheld, and what is clear."""
    withheld, keyed, total = manifest.withheld_names(), manifest.keyed(), manifest.count(manifest.tensors)
    residual = [str(group.size) for group in residual_only(manifest.groups)]
    inner = len(manifest.groups) - len(residual)
    cover = f", and {inner} groups inside the blocks (these groups add no strength)" if inner else ""
    share = percent(manifest.count(keyed - withheld) / total)
    sentence = (
        f"{len(keyed - withheld)} of {len(manifest.tensors)} tensors are permuted ({share} of the parameters). "
        f"The key permutes {' + '.join(residual)} residual channels{cover}."
    )
    parts = () if manifest.withheld is None else manifest.withheld.parts
    if parts:
        share = percent(manifest.count(withheld) / total)
        sentence += (
            f" A second file (mode 0600) holds the withheld parts: {described(parts)} ({share} of the parameters)."
        )
    return (
        f"{sentence} {'Final' if 'embedding' in parts else 'Embedding, positions, final'} norm and head are not locked."
    )


@checks_arguments()
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
    `weights`, an open model, or a module of transformers. cover: also permute MLP units, heads and their channels,
    which leaves the function unchanged and only hinders the matching of weights. seal: encrypt every file at rest with
    the same key. withhold: "embedding", "blocks=K" or both; these parts go to the file `withheld` (default: beside
    `out`) instead of `out`. opening: arguments of `situs.open_model` for a name, and `ema` for a run.

    >>> locked = situs.lock("exported", situs.new_key("owner.key"), "locked")
    >>> situs.open_model(locked.path).facts["locked"]
    'yes, opened without its key'
    """
    parts, key = parse_parts(withhold), as_key(key)
    if withheld is not None and not parts:
        raise SitusError(
            f"withheld={withheld}: names a file for withheld parts, but no parts are to be withheld; name the parts "
            "in the option `withhold`",
            field="withhold",
        )
    with _model_folder(source, {name: value for name, value in opening.items() if value is not None}) as folder:
        return _lock_folder(folder, key, Path(out), cover, seal, parts, None if withheld is None else Path(withheld))


@contextmanager
def _model_folder(source: AnyModel, opening: dict[str, Any]) -> Iterator[Path]:
    """A model's folder itself, the export of a run, or another model as its library writes it."""
    place = None if isinstance(source, nn.Module | Model) else local_folder(os.fspath(source))
    with tempfile.TemporaryDirectory() as aside:
        if place is None or not place.exists():
            is_module = isinstance(source, nn.Module)
            opened = files.backbone_of(source, **opening) if is_module else open_model(source, **opening)
            if isinstance(opened, Model) and opened.locked:
                raise SitusError(f"{opened.name}: is locked already; open it with its key first")
            files.write_model(opened, Path(aside))
            yield Path(aside)
            return
        if isinstance(source, str) and hub_address(source):  # the hub's cache has links, and a lock takes real files
            place = Path(shutil.copytree(place, Path(aside) / "hub"))
        ema = opening.pop("ema", None)
        for name, value in opening.items():
            raise SitusError(
                f"{name}={value}: applies only to a model given by name; the folder of a model has its own {name}",
                field=name,
            )
        yield export_run(place, Path(aside) / "export", ema=ema).path if is_run(place) else place


def _lock_folder(
    folder: Path, key: Key, out: Path, cover: bool, seal: bool, parts: tuple[str, ...], withheld: Path | None
) -> Written:
    if not (folder / files.CONFIG).is_file():
        raise SitusError(f"{folder}: is not a model with weights: a lock needs config.json and safetensors")
    weights = files.weight_files(folder)
    for name in sorted(path.name for path in folder.iterdir()):
        if name == NAME or name.endswith(SUFFIX):
            raise SitusError(
                f"{folder}: contains {name}, but this file name is reserved for locks. If the folder is not locked "
                "already, rename the file"
            )
    others, left_out = sort_files(folder, weights)
    headers = {name: files.header_of(folder, name) for name in weights}
    specs = files.all_specs(headers, folder)
    backbone = files.structure_of(folder)
    names = files.names_in_file(backbone, specs)
    moved = rename(backbone.groups(), names)
    moved = moved if cover else residual_only(moved)
    extra = check_tensors(backbone, specs, names, residual_only(moved))
    if parts and TABLE in others:
        raise SitusError(
            f"{backbone.name}: its position table is a separate file, and Situs can withhold parts only if the table "
            "is in the weight files; do not set `withhold`",
            field="withhold",
        )
    withheld_names = {names[name] for name in tensors_of(backbone, parts) if name in names}
    stamps, lock_id = files.stamps(folder, weights), secrets.token_hex(16)
    codes = codes_of(key, lock_id)
    clear: dict[str, str] = {}
    for name in weights:
        clear |= shards.codes_of(folder / name, headers[name], codes.tensor)
    layout = layout_of(specs.values())
    fingerprint = fingerprint_of(codes, layout, clear)
    keys = derive(key, moved, fingerprint, lock_id)
    certify_folder(folder, backbone, rename(moved, {in_file: in_model for in_model, in_file in names.items()}), keys)
    changes = changes_of(moved, keys, {name: spec.shape for name, spec in specs.items()})
    seal_key, second = key if seal else None, second_header(headers, withheld_names, lock_id)
    second_path = (withheld or default_path(out)) if parts else None

    with ExitStack() as stack:
        aside = stack.enter_context(files.new_folder(out))
        second_sink = None
        if second_path is not None:
            second_sink = stack.enter_context(new_second(second_path, second, seal_key, lock_id))
        create = partial(new_file, aside, seal=seal_key, lock_id=lock_id)
        locked: dict[str, str] = {}
        for name, header in headers.items():
            with shards.plain_source(folder / name) as reader, create(name) as writer:
                locked |= _lock_shard(reader, writer, second_sink, header, withheld_names, changes, codes)
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
            shards={name: codes.of("header", name, headers[name].without(withheld_names).raw) for name in weights},
            tensors={name: Entry(spec.dtype, spec.shape, locked[name]) for name, spec in specs.items()},
            files=copied,
            withheld=Withheld(parts, tuple(s.name for s in second.tensors), withheld_header) if parts else None,
        )
        manifest = write_manifest(aside, manifest, key)
    unlocked = {
        "Files left out, because a lock copies only known small files": left_out,
        "Tensors not locked, because the model does not use them": extra,
    }
    notes = [f"{reason}: {', '.join(names)}." for reason, names in unlocked.items() if names]
    return Written(out, manifest, [*_sentences(out, manifest, notes)], notes, second_path)


def _lock_shard(
    reader: PlainSource,
    writer: Sink | None,
    second: Sink | None,
    header: Header,
    withheld: set[str],
    changes: Mapping[str, Change],
    codes: Codes,
) -> dict[str, str]:
    """Writes a weight file, withheld tensors to `second`; returns the codes of its tensors."""
    assert writer is not None
    reader.seek(len(header.raw))
    writer.write(header.without(withheld).raw)

    def into(spec: Spec) -> Sink:
        return second if second is not None and spec.name in withheld else writer

    return shards.rewrite(lambda _: reader, into, header.tensors, changes, codes.tensor)


@checks_arguments()
def unlock(
    locked: str | os.PathLike[str],
    key: AnyKey,
    out: str | Path,
    *,
    retrained: bool = False,
    withheld: str | Path | None = None,
) -> Written:
    """Opens a locked folder with its key into the new folder `out`: the original files, bit for bit.

    The manifest is checked first, each tensor as it is read, and all together at the end; `out` appears only if
    everything is correct. retrained: accept tensors that training has changed; those that the key moves must have
    their old layout. withheld: the second file, if parts were withheld.

    >>> opened = situs.unlock("locked", "owner.key", "opened")
    >>> situs.open_model(opened.path).locked
    False
    """
    folder, key = Path(locked), as_key(key)
    manifest = read_manifest(folder, key)
    if retrained:
        notes = _unlock_retrained(folder, manifest, key, out, withheld)
        return Written(
            Path(out), manifest, [f"{out}: {manifest.model} was unlocked with the option `retrained`.", *notes], notes
        )
    with files.new_folder(out) as aside:
        _open(folder, manifest, key, aside, withheld)
    count = len(manifest.tensors)
    sentence = f"{out}: {manifest.model} was opened. Its {count} tensors are bit for bit the tensors before the lock."
    return Written(Path(out), manifest, [sentence])


def check(locked: str | Path, key: Key, withheld: str | Path | None = None) -> Manifest:
    """Reads a locked folder and refuses it unless every byte is unchanged since it was locked with this key."""
    manifest = read_manifest(Path(locked), key)
    _open(Path(locked), manifest, key, None, withheld)
    return manifest


@contextmanager
def readable(locked: Path, manifest: Manifest, key: Key | None, withheld: str | Path | None = None) -> Iterator[Path]:
    """A folder with decrypted files whose weights stay locked: the same one unless it is sealed or `withheld` is given.

    withheld: the second file, whose tensors are put back; None leaves them out, as the folder does.
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
    """Opens every file into `out` (None: only checks them) and refuses what differs from the manifest.

    keyed: leave the weights locked.
    """
    codes, withheld_names = codes_of(key, manifest.lock_id), manifest.withheld_names()
    changes = {} if keyed else openers(manifest, key)
    clear: dict[str, str] = {}
    first_only = keyed and withheld is None
    opening = nullcontext((None, None, {})) if first_only else open_second(folder, manifest, key, withheld)
    with opening as (second, _, originals):
        for name, code in manifest.shards.items():
            with locked_file(folder, name, manifest, key) as reader, new_file(out, name, private=True) as writer:
                header = shards.read_header(reader, name)
                if codes.of("header", name, header.raw) != code:
                    raise SitusError(
                        f"{folder}: the header of {name} has changed, so the file was altered or belongs to another "
                        "model"
                    )
                header = originals.get(name, header)
                if writer is not None:
                    writer.write(header.raw)
                clear |= shards.rewrite(
                    lambda spec, reader=reader: (
                        second if second is not None and spec.name in withheld_names else reader
                    ),
                    None if writer is None else lambda _, writer=writer: writer,
                    header.tensors,
                    changes,
                    codes.tensor,
                    lambda spec, code: _check_code(
                        withheld if spec.name in withheld_names else folder, manifest, spec, code
                    ),
                )
    for name, code in manifest.files.items():
        with locked_file(folder, name, manifest, key) as reader, new_file(out, name, private=True) as writer:
            if shards.copy(reader, writer, codes.start("file", name)) != code:
                raise SitusError(f"{folder}: {name} was altered since it was locked")
    if not keyed and fingerprint_of(codes, manifest.layout, clear) != manifest.fingerprint:
        raise SitusError(f"{folder}: the unlocked model is not the model that was locked")


def _check_code(where: str | Path | None, manifest: Manifest, spec: Spec, code: str) -> None:
    if spec.name not in manifest.tensors or manifest.tensors[spec.name].code != code:
        raise SitusError(
            f"{where}: {spec.name} is not the tensor that was locked. The file was altered, or belongs to another "
            "model. Use the option `retrained` only after authorised training, because this option accepts changed "
            "tensors without a check",
            field="retrained",
        )


# --- after training ---------------------------------------------------------------------------------------------


def _unlock_retrained(
    folder: Path, manifest: Manifest, key: Key, out: str | Path, withheld: str | Path | None
) -> list[str]:
    """Opens a locked model after authorised training into `out`; returns sentences on what could not be checked.

    withheld: the second file. A tensor of the folder itself (a trained embedding, say) takes precedence over it.
    """
    if manifest.sealed:
        raise SitusError(
            f"{folder}: is sealed (encrypted), so it cannot have been trained since the lock; open it without the "
            "option `retrained`",
            field="retrained",
        )
    weights = files.weight_files(folder)
    others, left_out = sort_files(folder, [*weights, NAME], refuse=False)
    headers = {name: files.header_of(folder, name) for name in weights}
    specs = files.all_specs(headers, folder)
    old = {spec.name: spec for spec in manifest.specs()}
    absent = manifest.withheld_names() - specs.keys()
    _check_layout(folder, manifest, specs, old, absent)
    changes, codes = openers(manifest, key), codes_of(key, manifest.lock_id)
    changed: set[str] = set()

    def compare(spec: Spec, code: str) -> None:
        if spec.name in absent and manifest.tensors[spec.name].code != code:
            raise SitusError(f"{withheld}: {spec.name} is not the tensor that was withheld: the file was altered")
        if spec.name not in old or manifest.tensors[spec.name].code != code:
            changed.add(spec.name)

    unneeded = not absent and withheld is None
    opening = nullcontext((None, None, {})) if unneeded else open_second(folder, manifest, key, withheld)
    with opening as (second, second_header, originals), files.new_folder(out) as aside:
        second_places = {} if second_header is None else second_header.places()
        for name in weights:
            whole = _whole(folder, name, headers[name], originals, absent)
            places = headers[name].places()
            with shards.plain_source(folder / name) as reader, new_file(aside, name, private=True) as writer:
                assert writer is not None
                writer.write(whole.raw)

                def at(spec: Spec, reader: PlainSource = reader, places: dict[str, int] = places) -> ByteSource:
                    source = second if spec.name in absent else reader
                    assert isinstance(source, PlainSource)
                    source.seek(second_places[spec.name] if spec.name in absent else places[spec.name])
                    return source

                shards.rewrite(at, lambda _, writer=writer: writer, whole.tensors, changes, codes.tensor, compare)
        for name in others:
            with shards.plain_source(folder / name) as reader, new_file(aside, name, private=True) as writer:
                shards.copy(reader, writer, codes.start("file", name))
    names = (specs.keys() | old.keys()) - absent
    differing = sorted(name for name in names if specs.get(name) != old.get(name))
    return [
        (
            f"{len(changed)} of {len(specs)} tensors changed since the lock: they are accepted as retrained, without "
            "a check."
        ),
        *(
            [
                (
                    "These tensors, which the key does not permute, were added, removed, or changed in shape or dtype "
                    f"since the lock: {', '.join(differing)}."
                )
            ]
            if differing
            else []
        ),
        *(
            [f"Files not copied to the opened folder, because they may contain locked weights: {', '.join(left_out)}."]
            if left_out
            else []
        ),
    ]


def _check_layout(
    folder: Path, manifest: Manifest, specs: dict[str, Spec], old: dict[str, Spec], absent: frozenset[str]
) -> None:
    for name in sorted(manifest.keyed() - absent):
        if specs.get(name) != old[name]:
            now = (
                "is missing"
                if name not in specs
                else f"has dtype {specs[name].dtype} and shape {list(specs[name].shape)}"
            )
            raise SitusError(
                f"{folder}: {name} {now}, but was locked with dtype {old[name].dtype} and shape "
                f"{list(old[name].shape)}; the key fits only the dtype and shape that this tensor had when "
                "it was locked",
                field="retrained",
            )


def _whole(folder: Path, name: str, header: Header, originals: dict[str, Header], absent: frozenset[str]) -> Header:
    """The header of a trained file with the withheld tensors inserted again."""
    if not absent:
        return header
    present = {spec.name for spec in header.tensors}
    original = originals.get(name)
    if original is None or {spec.name for spec in original.tensors} - absent != present:
        raise SitusError(
            f"{folder}: {name} does not have the same tensor names as when the model was locked, so the withheld "
            "tensors cannot be added to it. Save the trained model with all its tensors, also the withheld ones, to a "
            "new folder, and open that folder",
            field="retrained",
        )
    specs = {spec.name: spec for spec in header.tensors}
    return shards.make_header([specs.get(spec.name, spec) for spec in original.tensors], original.notes)
