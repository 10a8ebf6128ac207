"""Opening a locked model that was trained since: new values, the layout that was locked."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from situs.errors import SitusError
from situs.locks import folder as files
from situs.locks import shards
from situs.locks.contents import sort_files
from situs.locks.key import Key, codes_of
from situs.locks.manifest import NAME, Manifest, openers
from situs.locks.seal import new_file
from situs.locks.shards import ByteSource, Header, PlainSource, Spec
from situs.locks.withhold import open_second


def unlock_retrained(
    folder: Path, manifest: Manifest, key: Key, out: str | Path, withheld: str | Path | None
) -> list[str]:
    """Opens what authorised training has made of a lock; says what was taken unchecked.

    withheld: the second file. What the folder holds itself, a trained embedding say, goes before what is in it.
    """
    if manifest.sealed:
        raise SitusError(
            f"{folder}: is sealed, so it cannot have been trained since; open it without retrained", field="retrained"
        )
    weights = files.weight_files(folder)
    others, left = sort_files(folder, [*weights, NAME], refuse=False)
    headers = {name: files.header_of(folder, name) for name in weights}
    specs = files.all_specs(headers, folder)
    old = {spec.name: spec for spec in manifest.specs()}
    absent = manifest.held() - specs.keys()
    _check_layout(folder, manifest, specs, old, absent)
    changes, codes = openers(manifest, key), codes_of(key, manifest.lock_id)
    changed: set[str] = set()

    def compare(spec: Spec, code: str) -> None:
        if spec.name in absent and manifest.tensors[spec.name].code != code:
            raise SitusError(f"{withheld}: {spec.name} is not the tensor that was withheld: the file was altered")
        if spec.name not in old or manifest.tensors[spec.name].code != code:
            changed.add(spec.name)

    unneeded = not absent and withheld is None
    opened = nullcontext((None, None, {})) if unneeded else open_second(folder, manifest, key, withheld)
    with opened as (second, second_header, originals), files.new_folder(out) as aside:
        apart = {} if second_header is None else second_header.places()
        for name in weights:
            whole = _whole(folder, name, headers[name], originals, absent)
            places = headers[name].places()
            with shards.plain_source(folder / name) as reader, new_file(aside, name, private=True) as writer:
                assert writer is not None
                writer.write(whole.raw)

                def at(spec: Spec, reader: PlainSource = reader, places: dict[str, int] = places) -> ByteSource:
                    source = second if spec.name in absent else reader
                    assert isinstance(source, PlainSource)
                    source.seek(apart[spec.name] if spec.name in absent else places[spec.name])
                    return source

                shards.rewrite(at, lambda _, writer=writer: writer, whole.tensors, changes, codes.tensor, compare)
        for name in others:
            with shards.plain_source(folder / name) as reader, new_file(aside, name, private=True) as writer:
                shards.copy(reader, writer, codes.start("file", name))
    names = (specs.keys() | old.keys()) - absent
    other = sorted(name for name in names if specs.get(name) != old.get(name))
    return [
        f"{len(changed)} of {len(specs)} tensors are not those that were locked: accepted as retrained, unchecked.",
        *([f"Clear tensors that are new, gone or of another shape: {', '.join(other)}."] if other else []),
        *([f"Left behind, as they may hold locked weights: {', '.join(left)}."] if left else []),
    ]


def _check_layout(
    folder: Path, manifest: Manifest, specs: dict[str, Spec], old: dict[str, Spec], absent: frozenset[str]
) -> None:
    for name in sorted(manifest.keyed() - absent):
        if specs.get(name) != old[name]:
            now = "is not there" if name not in specs else f"is {specs[name].dtype} {list(specs[name].shape)}"
            raise SitusError(
                f"{folder}: {name} {now}, locked was {old[name].dtype} {list(old[name].shape)}: the key fits the "
                "layout that was locked, and no other",
                field="retrained",
            )


def _whole(folder: Path, name: str, header: Header, originals: dict[str, Header], absent: frozenset[str]) -> Header:
    """The header of a trained file with what is withheld put back where it was; its own where nothing is."""
    if not absent:
        return header
    there = {spec.name for spec in header.tensors}
    known = originals.get(name)
    if known is None or {spec.name for spec in known.tensors} - absent != there:
        raise SitusError(
            f"{folder}: {name} holds other tensors than the file that was locked, so what was withheld has no place in "
            "it: save the whole model, and open that",
            field="retrained",
        )
    specs = {spec.name: spec for spec in header.tensors}
    return shards.make_header([specs.get(spec.name, spec) for spec in known.tensors], known.notes)
