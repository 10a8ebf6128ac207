"""Opens a locked model with its key: the files that were locked, bit for bit, or nothing.

The manifest is checked before a tensor is read and each tensor before it is used; the folder appears when all was
right, its files readable by you alone (mode 0600).

For example: situs unlock locked --key owner.key --out unlocked
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.shell import answer


@dataclass(frozen=True)
class Args:
    """A locked model, opened."""

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key it was locked with."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The folder to write; it must not exist."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts were withheld."""

    retrained: bool = False
    """The locked weights were trained since: take new values of the same layout (manifest.json beside them)."""


def run(args: Args) -> None:
    """Writes the open folder and says what it is."""
    from situs.cli.locks.passphrase import read_key
    from situs.locks import unlock

    key = read_key(args.key)
    said = str(unlock(args.locked, key, args.out, retrained=args.retrained, withheld=args.withheld))
    answer({"unlocked": args.out, "said": said}, said)
