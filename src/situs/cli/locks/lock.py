"""Locks a model with a key: the channels between its blocks are permuted, so that it is useless without the key.

Embedding, positions, final norm and head stay clear unless they are withheld; the blocks' weights are moved, never
changed, and unlock gives back the same files bit for bit. Known small files are taken along (settings, tokenisers,
README, licence), others left out and named. A lock is obfuscation, not encryption: see situs audit lock.

For example: situs lock exported --key owner.key --out locked
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import ShapeArgs
from situs.cli.shell import answer


@dataclass(frozen=True, kw_only=True)
class Args(ShapeArgs):
    """A model, locked with a key."""

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """A run, the folder of a model (an export, or a timm or transformers folder with safetensors), or a timm name with
    its weights (NAME=FILE or --weights)."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key (situs key new)."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The folder to write; it must not exist."""

    withhold: Annotated[tuple[str, ...], Parameter(metavar="PART")] = ()
    """Leave a part in a second file for the owner: embedding (all before the blocks), blocks=K (the first K), or
    both: embedding,blocks=K."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The second file to write (mode 0600); by default beside the locked folder."""

    seal: bool = False
    """Encrypt the files at rest as well (AES-256-GCM); the manifest, with names and shapes, stays readable."""

    cover: bool = False
    """Also move MLP units, heads and their channels: it hinders matching, and is no strength of its own."""


def run(args: Args) -> None:
    """Writes the locked folder and says what it is."""
    from situs.cli.locks.passphrase import read_key
    from situs.locks import lock

    asked = {name: getattr(args, name) for name in ("withhold", "withheld", "cover", "seal")}
    locked = lock(args.model, read_key(args.key), args.out, **asked, **args.shape())
    also = "" if locked.withheld is None else f" --withheld {locked.withheld}"
    told = f"Open it with situs unlock {args.out} --key {args.key}{also} --out DIR."
    answer({"locked": args.out, "withheld": locked.withheld, "said": str(locked)}, str(locked), told)
