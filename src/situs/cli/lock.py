"""Locks a model with a key: the channels between its blocks are permuted, so that it is useless without the key.

Embedding, positions, final norm and head stay clear; the blocks' weights are moved, never changed, and unlock gives
back the same files bit for bit. A lock is obfuscation, not encryption: see situs audit lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

HONEST = (
    "A lock is obfuscation, not encryption: whoever has the model it was made from can match the columns and find the "
    "key. situs audit lock {path} measures what that takes."
)


@dataclass(frozen=True)
class Args:
    """A model, locked with a key."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model: an export, or a timm or transformers folder with safetensors."""

    key: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The key (situs key new)."""

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to write; it must not exist."""

    seal: tyro.conf.FlagCreatePairsOff[bool] = False
    """Encrypt the files at rest as well (AES-256-GCM); the manifest stays readable."""

    cover: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also move MLP units, heads and their channels: it hinders matching, and is no strength of its own."""


def run(args: Args) -> None:
    """Writes the locked folder and says what it is."""
    from situs.cli.passphrase import read_key
    from situs.locks.lock import lock

    key = read_key(args.key)
    locked = lock(args.model, key, args.out, groups="all" if args.cover else "residual", seal=args.seal)
    manifest = locked.manifest
    residual = [str(group.size) for group in manifest.groups if group.kind == "residual"]
    inner = len(manifest.groups) - len(residual)
    cover = f" and {inner} inner groups as cover" if inner else ""
    print(f"{args.out}: {manifest.model} locked with the key {key.id}.")
    print(
        f"{len(manifest.keyed())} of {len(manifest.tensors)} tensors moved: {' + '.join(residual)} residual "
        f"channels{cover}; embedding, positions, final norm and head are clear."
    )
    if args.seal:
        print("Every file but manifest.json is encrypted with the same key; the manifest shows names, shapes, hashes.")
    print(HONEST.format(path=args.out))
    print(f"Open it with situs unlock {args.out} --key {args.key} --out DIR.")
