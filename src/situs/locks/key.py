"""Keys: a 256-bit seed in a file of its own, and the permutations that follow from it.

    HKDF(seed; group name, fingerprint of the clear model, random lock id) -> ChaCha20 stream -> Fisher-Yates

The lock id is random for every lock, so two models locked with one key, or one model locked twice, share nothing. A
passphrase encrypts the seed: Argon2id derives a key from it, AES-GCM encrypts the seed under that key.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.backbones.layout import Group
from situs.config import checks_arguments, from_dict, to_dict
from situs.errors import SitusError, missing_extra, reason_of
from situs.locks.shards import new_private_file, unique

VERSION = 1
SEED_BYTES = 32
ID_DIGITS = 16
LARGEST_FILE = 1 << 16
PASSPHRASE = "SITUS_PASSPHRASE"  # noqa: S105
"""The environment variable with a key's passphrase."""

_WORD = np.uint64(2**64 - 1)


@dataclass(frozen=True)
class Key:
    """A seed and its public id, which is derived from the seed and reveals nothing about it."""

    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES:
            raise SitusError(
                f"the seed of a key has {len(self.seed)} bytes, but must have {SEED_BYTES} bytes", field="seed"
            )

    @property
    def id(self) -> str:
        """How manifests name this key, 16 hexadecimal digits."""
        return self.subkey("key id").hex()[:ID_DIGITS]

    def subkey(self, purpose: str, *parts: str) -> bytes:
        """A key of 32 bytes for one purpose: HKDF-SHA256; each part is prefixed with its length."""
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise missing_extra("cryptography", "locks", "a key") from error
        info = _words(f"situs {purpose} {VERSION}", *parts)
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(self.seed)


AnyKey = Key | str | Path
"""A key, or the file that holds it."""


@dataclass(frozen=True)
class Codes:
    """The authentication codes of one lock: HMAC-SHA256 under a key of its own.

    A plain hash would confirm a guess of the content. These codes reveal nothing without the key, not even whether two
    locks have the same content.
    """

    secret: bytes = field(repr=False)

    def start(self, kind: str, name: str) -> hmac.HMAC:
        """A new code; kind and name are part of it, so one object's code is never valid for another."""
        return hmac.new(self.secret, _words(kind, name), "sha256")

    def tensor(self, name: str) -> hmac.HMAC:
        """A new code for a tensor, whichever file holds it."""
        return self.start("tensor", name)

    def of(self, kind: str, name: str, data: bytes) -> str:
        """The code of these bytes."""
        code = self.start(kind, name)
        code.update(data)
        return code.hexdigest()


def codes_of(key: Key, lock_id: str) -> Codes:
    """The codes of the lock with this id."""
    return Codes(key.subkey("codes", lock_id))


def _words(*texts: str) -> bytes:
    """Concatenated texts, each prefixed with its length."""
    words = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"".join(len(word).to_bytes(4, "big") + word for word in words)


@dataclass(frozen=True)
class Wrapping:
    """How a passphrase encrypts the seed: Argon2id's salt and costs (memory in KiB), AES-GCM's nonce."""

    salt: str
    nonce: str
    passes: int = 3
    memory: int = 65536
    lanes: int = 4

    def __post_init__(self) -> None:
        # The costs are read from a file: without a limit, a file could demand any memory and time.
        allowed = 1 <= self.passes <= 16 and 1 <= self.lanes <= 64 and 8 * self.lanes <= self.memory <= 1 << 20
        if not allowed or len(_decode(self.salt)) < 16 or len(_decode(self.nonce)) != 12:
            raise SitusError(
                "its passphrase encryption has Argon2id costs out of range, or a salt or nonce of the wrong length"
            )


@dataclass(frozen=True)
class KeyFile:
    """The content of a key file. seed: base64, plain or encrypted."""

    version: int
    id: str
    seed: str = field(repr=False)
    passphrase: Wrapping | None = None


@checks_arguments()
def new_key(path: str | Path, passphrase: str | None = None) -> Key:
    """Makes a key and writes it to a new file that only its owner can read (mode 0600).

    An existing file is never overwritten. passphrase: encrypts the key, so the file alone opens nothing. Keep a copy
    elsewhere: without the key, a locked model cannot be unlocked.

    >>> key = situs.new_key("owner.key")
    >>> situs.new_key("owner.key")
    Traceback (most recent call last):
    situs.errors.SitusError: owner.key: ...
    """
    key = draw_key()
    write_key(key, path, passphrase)
    return key


def draw_key() -> Key:
    """A new key, written to no file."""
    return Key(secrets.token_bytes(SEED_BYTES))


def write_key(key: Key, path: str | Path, passphrase: str | None = None) -> None:
    """Writes a key to a new file, as `new_key` does."""
    if passphrase == "":
        raise SitusError("an empty passphrase does not protect the key; choose another passphrase", field="passphrase")
    seed, wrapping = key.seed, None
    if passphrase is not None:
        wrapping = Wrapping(_encode(secrets.token_bytes(16)), _encode(secrets.token_bytes(12)))
        seed = _cipher(passphrase, wrapping).encrypt(_decode(wrapping.nonce), key.seed, key.id.encode())
    key_file = KeyFile(VERSION, key.id, _encode(seed), wrapping)
    with new_private_file(Path(path), "a key", "out") as file:
        file.write((json.dumps(to_dict(key_file), indent=2) + "\n").encode())


def load_key(path: str | Path, passphrase: str | None = None) -> Key:
    """The key in a file that `new_key` wrote; refuses a file that others may read."""
    path = Path(path)
    key_file = _read(path)
    seed, wrapping = _decode(key_file.seed), key_file.passphrase
    if wrapping is not None:
        if not passphrase:
            raise SitusError(
                f"{path}: this key has a passphrase; give it in the environment variable {PASSPHRASE}", field="key"
            )
        from cryptography.exceptions import InvalidTag

        try:
            seed = _cipher(passphrase, wrapping).decrypt(_decode(wrapping.nonce), seed, key_file.id.encode())
        except InvalidTag:
            raise SitusError(
                f"{path}: the passphrase is wrong, or the file was altered", field=("passphrase", "key")
            ) from None
    if len(seed) != SEED_BYTES or Key(seed).id != key_file.id:
        raise SitusError(f"{path}: its id does not belong to its seed, so the file was altered", field="key")
    return Key(seed)


def as_key(key: AnyKey) -> Key:
    """The key itself, or the key in a file; its passphrase comes from the environment (SITUS_PASSPHRASE)."""
    return key if isinstance(key, Key) else load_key(key, os.environ.get(PASSPHRASE))


def needs_passphrase(path: str | Path) -> bool:
    """Whether `load_key` needs a passphrase for this file."""
    return _read(Path(path)).passphrase is not None


def _read(path: Path) -> KeyFile:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise SitusError(f"{path}: is not a file, so it cannot be a key", field="key")
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise SitusError(f"{path}: the key cannot be read: {reason_of(error)}", field="key") from None
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise SitusError(
            f"{path}: other users can read this key (mode {stat.S_IMODE(mode):04o}); run chmod 600 on it first",
            field="key",
        )
    try:
        if len(raw) > LARGEST_FILE:
            raise SitusError("too large")
        tables = json.loads(raw, object_pairs_hook=unique)
        version = tables["version"] if isinstance(tables, dict) and "version" in tables else None
        if version != VERSION or isinstance(version, bool):
            raise SitusError(f"its version is {version!r:.40}, but this Situs reads version {VERSION}")
        key_file = from_dict(KeyFile, tables)
        _decode(key_file.seed)
    except (SitusError, ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, SitusError) else "it is not valid JSON"
        raise SitusError(f"{path}: is not a key file of situs keygen: {reason[:200]}", field="key") from None
    return key_file


def _cipher(passphrase: str, wrapping: Wrapping) -> Any:
    try:
        from argon2.low_level import Type, hash_secret_raw
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise missing_extra("argon2-cffi", "locks", "a passphrase") from error
    costs = {"time_cost": wrapping.passes, "memory_cost": wrapping.memory, "parallelism": wrapping.lanes}
    return AESGCM(hash_secret_raw(passphrase.encode(), _decode(wrapping.salt), **costs, hash_len=32, type=Type.ID))


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _decode(text: str) -> bytes:
    with suppress(ValueError):
        raw = base64.b64decode(text, validate=True)
        if _encode(raw) == text:  # base64 has several spellings of the same bytes; one is accepted
            return raw
    raise SitusError("its seed, salt or nonce is not valid base64")


def derive(key: Key, groups: Iterable[Group], fingerprint: str, lock_id: str) -> dict[str, Tensor]:
    """The permutation of each group: group name -> [size] int64 (gather convention y[i] = x[p[i]])."""
    permutations = {}
    for group in groups:
        draw = keystream(key, "permutation", group.name, fingerprint, lock_id)
        permutations[group.name] = torch.from_numpy(fisher_yates(group.size, draw))
    return permutations


def keystream(key: Key, purpose: str, *parts: str) -> Callable[[int], np.ndarray]:
    """count -> the next `count` words, uint64, of ChaCha20 under a subkey that must have no other use."""
    secret = key.subkey(purpose, *parts)
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(secret, bytes(16)), mode=None).encryptor()
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def fisher_yates(size: int, draw: Callable[[int], np.ndarray]) -> np.ndarray:
    """A uniform random permutation of range(size), [size] int64.

    draw: count -> that many independent uniform words, uint64. Step i needs a number below i + 1; a word from the
    incomplete last multiple of i + 1 below 2^64 would favour small numbers, so it is drawn again.
    """
    spans = np.arange(size, 1, -1, dtype=np.uint64)
    chosen = np.zeros(len(spans), dtype=np.int64)
    pending = np.arange(len(spans))
    while len(pending):
        words, span = draw(len(pending)), spans[pending]
        incomplete = (_WORD % span + np.uint64(1)) % span
        good = words <= _WORD - incomplete
        chosen[pending[good]] = (words % span)[good]
        pending = pending[~good]
    order = list(range(size))
    for i, j in zip(range(size - 1, 0, -1), chosen.tolist(), strict=True):
        order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)
