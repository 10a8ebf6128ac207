"""Joins a client's and a server's part to an ordinary run, which evaluate, export, audit and --resume open.

For example: situs split merge runs/split runs/server --out runs/whole
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.shell import answer, beside, next_line
from situs.errors import counted


@dataclass(frozen=True, kw_only=True)
class Args:
    """Two parts, one run."""

    client: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The client's part."""

    server: Annotated[Path, POSITIONAL, Parameter(metavar="SERVER")]
    """The server's folder, or that of one session in it."""

    out: Annotated[Path, Parameter(metavar="DIR")]
    """A new folder for the run."""

    locked: bool = False
    """Leave channels as the server has them, in a locked folder that situs unlock --retrained opens; needs no key."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key that channels were permuted by, where it is not in the client's folder."""


def run(args: Args) -> None:
    """Writes the run and says where it stands."""
    from situs.cli.locks.passphrase import read_key
    from situs.split.whole import merge, merge_locked

    if args.locked:
        step = merge_locked(args.client, args.server, args.out)
        told = f"Open it with situs unlock {args.out} --retrained --key FILE --out DIR."
        answer(
            {"locked": args.out, "steps": step}, f"{args.out}: locked as it was, after {counted(step, 'steps')}", told
        )
        return
    step = merge(args.client, args.server, args.out, key=None if args.key is None else read_key(args.key))
    told = next_line(["evaluate", "accuracy", args.out], ["export", args.out, "--out", beside(args.out, "exported")])
    answer({"run": args.out, "steps": step}, f"{args.out}: the whole run after {counted(step, 'steps')}", told)
