"""manifest.json: what was locked, with which key, and the codes that authenticate it.

Everything in it is public: names, shapes, groups, which parts are withheld. Contents appear only as HMACs under the
owner's key, which reveal nothing to others. One more HMAC covers every byte of the manifest itself; it is checked
before anything else is used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from situs.backbones.layout import Group
from situs.config import from_dict
from situs.errors import SitusError, reason_of
from situs.files import write_text
from situs.locks.groups import changes_of, invert_keys
from situs.locks.key import ID_DIGITS, Codes, Key, derive
from situs.locks.shards import WIDTHS, Change, Spec, unique

NAME = "manifest.json"
FORMAT = "situs-lock"
VERSION = 2
LARGEST_FILE = 1 << 26
LOCK_DIGITS, CODE_DIGITS = 32, 64
PART = re.compile("embedding|blocks=[1-9][0-9]{0,3}")
_FILE_NAME = re.compile(r"(?!\.{1,2}(?:/|$))[^/\\\0:]{1,255}(?:/(?!\.{1,2}(?:/|$))[^/\\\0:]{1,255})*")


@dataclass(frozen=True)
class Entry:
    """One tensor: its layout and the code of its locked bytes."""

    dtype: str
    shape: tuple[int, ...]
    code: str


@dataclass(frozen=True)
class Withheld:
    """What the owner's second file holds.

    parts: "embedding", "blocks=K" (the first K). tensors: their names, in the order of that file. header: the code of
    its header.
    """

    parts: tuple[str, ...]
    tensors: tuple[str, ...]
    header: str


@dataclass(frozen=True)
class Manifest:
    """The description of a locked folder.

    layout: hash of the tensors' names, shapes and dtypes. fingerprint: code of the clear model. groups: what the key
    moves, under the names in the files. shards: weight file -> code of its header. tensors: all of the model, withheld
    ones too. files: every other file -> code of its decrypted content.
    """

    version: int
    situs: str
    model: str
    key_id: str
    lock_id: str
    sealed: bool
    layout: str
    fingerprint: str
    groups: tuple[Group, ...]
    shards: dict[str, str]
    tensors: dict[str, Entry]
    files: dict[str, str]
    withheld: Withheld | None = None
    format: str = FORMAT
    hmac: str = ""

    def __post_init__(self) -> None:
        _digits("key_id", self.key_id, ID_DIGITS)
        _digits("lock_id", self.lock_id, LOCK_DIGITS)
        for name in ("layout", "fingerprint", *(("hmac",) if self.hmac else ())):
            _digits(name, getattr(self, name), CODE_DIGITS)
        for name, digest in (self.shards | self.files).items():
            _digits(f"the authentication code of {name[:80]!r}", digest, CODE_DIGITS)
            if not _FILE_NAME.fullmatch(name) or name == NAME:
                raise SitusError(f"{name[:80]!r} is not the name of a file in this folder")
        if not self.shards or self.shards.keys() & self.files.keys():
            raise SitusError("it names no weight file, or names a file twice")
        for name, entry in self.tensors.items():
            _digits(f"the authentication code of {name[:80]!r}", entry.code, CODE_DIGITS)
            if entry.dtype not in WIDTHS or not all(0 <= side < 2**48 for side in entry.shape):
                raise SitusError(f"{name[:80]!r} has an invalid dtype or shape")
        if self.layout != layout_of(self.specs()):
            raise SitusError("its hash of tensor names, dtypes and shapes does not match the tensors that it lists")
        _check_groups(self.groups, self.tensors)
        if self.withheld is not None:
            _check_withheld(self.withheld, self.tensors)

    def specs(self) -> list[Spec]:
        """The tensors' names and layouts."""
        return [Spec(name, entry.dtype, entry.shape) for name, entry in self.tensors.items()]

    def keyed(self) -> set[str]:
        """The names of the tensors that the key moves."""
        return {member.tensor for group in self.groups for member in group.members}

    def withheld_names(self) -> frozenset[str]:
        """The names of the tensors that are not in the locked folder."""
        return frozenset() if self.withheld is None else frozenset(self.withheld.tensors)

    def count(self, names: Iterable[str]) -> int:
        """The number of elements of these tensors."""
        return sum(math.prod(self.tensors[name].shape) for name in names)


def _check_withheld(withheld: Withheld, tensors: Mapping[str, Entry]) -> None:
    _digits("the authentication code of the withheld tensors", withheld.header, CODE_DIGITS)
    names = set(withheld.tensors)
    if not withheld.parts or not names or len(names) != len(withheld.tensors) or not names < tensors.keys():
        raise SitusError("its list of withheld parts does not match its list of tensors")
    for part in withheld.parts:
        if not PART.fullmatch(part):
            raise SitusError(f"{part[:80]!r} is not a part that can be withheld")


def _check_groups(groups: tuple[Group, ...], tensors: Mapping[str, Entry]) -> None:
    if not groups or len({group.name for group in groups}) != len(groups):
        raise SitusError("it names no group of channels, or names a group twice")
    for group in groups:
        for member in group.members:
            shape = tensors[member.tensor].shape if member.tensor in tensors else ()
            if not 0 <= member.axis < len(shape) or min(group.size, member.outer, member.inner) < 1:
                raise SitusError(f"the group {group.name[:80]!r} names a tensor or an axis that does not exist")
            length = shape[member.axis] - member.start if member.length is None else member.length
            inside = member.start >= 0 and member.start + length <= shape[member.axis]
            if not inside or member.outer * group.size * member.inner != length:
                raise SitusError(
                    f"the group {group.name[:80]!r} does not match the shape of its tensor {member.tensor[:80]!r}"
                )
            if member.at is not None:
                axis, index = member.at
                if not (0 <= axis < len(shape) and axis != member.axis and 0 <= index < shape[axis]):
                    raise SitusError(f"the group {group.name[:80]!r} names a slice that does not exist")


def _digits(name: str, text: str, count: int) -> None:
    if not re.fullmatch(f"[0-9a-f]{{{count}}}", text):
        raise SitusError(f"{name} must be {count} hexadecimal digits")


def layout_of(specs: Iterable[Spec]) -> str:
    """The hash of names, dtypes and shapes, in any order and any division into files."""
    rows = sorted([spec.name, spec.dtype, list(spec.shape)] for spec in specs)
    return hashlib.sha256(_canonical(rows)).hexdigest()


def fingerprint_of(codes: Codes, layout: str, tensors: Mapping[str, str]) -> str:
    """The code of a clear model: its layout and the code of each tensor's bytes."""
    return codes.of("fingerprint", "", _canonical([layout, sorted(tensors.items())]))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _text(manifest: Manifest) -> str:
    """The text of the file; a manifest has exactly one."""
    return json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n"


def _code(manifest: Manifest, key: Key) -> str:
    secret = key.subkey("manifest", manifest.lock_id)
    return hmac.new(secret, _text(replace(manifest, hmac="")).encode(), "sha256").hexdigest()


def permutations_of(manifest: Manifest, key: Key) -> dict[str, Tensor]:
    """The permutation of each locked group under the owner's key: group name -> [size]."""
    return derive(key, manifest.groups, manifest.fingerprint, manifest.lock_id)


def write_manifest(folder: Path, manifest: Manifest, key: Key) -> Manifest:
    """Writes a manifest with the HMAC of `key`."""
    signed = replace(manifest, hmac=_code(manifest, key))
    write_text(folder / NAME, _text(signed))
    return signed


def read_manifest(folder: Path, key: Key | None) -> Manifest:
    """The manifest of a locked folder, refused unless every field is valid and `key` signed it.

    key: None reads it unverified, as an attacker would: trust nothing in it.
    """
    path = folder / NAME
    try:
        if path.exists() and not path.is_file():
            raise SitusError(f"{path}: is not a file, so {folder} is not a locked model")
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise SitusError(
            f"{folder}: holds no {NAME}, so it is not a locked model (situs lock writes this file)"
        ) from None
    except OSError as error:
        raise SitusError(f"{path}: cannot be read: {reason_of(error)}") from None
    manifest = _parse(path, raw)
    if key is None:
        return manifest
    if manifest.key_id != key.id:
        raise SitusError(f"{path}: was locked with the key {manifest.key_id}, but this key is {key.id}", field="key")
    if not hmac.compare_digest(manifest.hmac, _code(manifest, key)):
        raise SitusError(f"{path}: its HMAC is wrong, so the manifest was altered since the lock")
    if raw != _text(manifest).encode():
        raise SitusError(f"{path}: its text is not the text that the lock wrote, so the file was altered")
    return manifest


def _parse(path: Path, raw: bytes) -> Manifest:
    try:
        if len(raw) > LARGEST_FILE:
            raise SitusError("it is too large")
        tables = json.loads(raw, object_pairs_hook=unique)
        if not isinstance(tables, dict) or tables.get("format") != FORMAT:
            raise SitusError("it is not in the format of situs lock")
        version = tables.get("version")
        if type(version) is not int or version != VERSION:
            old = ": open it with the version of Situs that locked it" if version == 1 else ""
            raise SitusError(f"its version is {version!r:.40}, but this Situs reads version {VERSION}{old}")
        manifest = from_dict(Manifest, tables)
        if not manifest.hmac:
            raise SitusError("it has no HMAC")
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, SitusError) else "it is not valid JSON"
        raise SitusError(f"{path}: is not a valid manifest: {' '.join(reason.split())[:300]}") from None
    return manifest


def openers(manifest: Manifest, key: Key) -> dict[str, Change]:
    """Tensor name -> the function that undoes the key."""
    keys = invert_keys(permutations_of(manifest, key))
    return changes_of(manifest.groups, keys, {spec.name: spec.shape for spec in manifest.specs()})
