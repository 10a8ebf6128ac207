"""A new key in a file that only you may read: 256 random bits, from which every permutation of a lock follows.

For example: situs key new --out owner.key
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.shell import answer


@dataclass(frozen=True)
class Args:
    """A new key."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The file to write; one that exists is never overwritten."""

    passphrase: bool = False
    """Wrap the key with a passphrase: SITUS_PASSPHRASE, or asked for."""


def run(args: Args) -> None:
    """Writes the key and says what losing it means."""
    from situs.cli.locks.passphrase import choose_passphrase
    from situs.locks import new_key

    key = new_key(args.out, choose_passphrase() if args.passphrase else None)
    wrapped = "with a passphrase" if args.passphrase else "without a passphrase"
    answer(
        {"key": args.out, "id": key.id, "passphrase": args.passphrase},
        f"{args.out}: key {key.id}, {wrapped}, readable by you alone (mode 0600).",
        "Keep a copy elsewhere: what was locked with it cannot be opened without it.",
    )
