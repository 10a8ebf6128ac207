"""Attack a locked model as somebody without its key would, and say what is left of the lock.

For example: situs audit lock locked --key owner.key --base exported --out strength

With what the attacker may have: situs audit lock locked/ --attacker drifted-base --base MODEL --drift 0.3,1,3

A lock is obfuscation, not encryption: who has the model it was made from reads the key off its weights, and who has
a few images may come near it without.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present
from situs.locks.attacks import LockAuditConfig


@dataclass(frozen=True)
class Args:
    """Attacks on a lock."""

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder (situs lock)."""

    attacker: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """no-base, images, activations, public-base, drifted-base or labels; several apart by commas. By default
    no-base, images where there are --images or --texts, and public-base where there is a --base."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """What the attacker has: a run, an export or model folder, or a timm name with --weights."""

    weights: Annotated[str | None, Parameter(metavar="FILE")] = None
    """The weights of a --base that is a timm name."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's key, to judge the attacks by; not needed where --base is the very model that was locked."""

    images: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Unlabelled images for the attackers `images` and `activations`: any that look like those it was made for."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The same for a model of words: a file with a text on each line; the locked folder brings the tokeniser."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Labelled images or sentences: for the attacker `labels`, and to measure accuracy before and after each attack."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Write audit.html and audit.json there."""

    config: LockAuditConfig = configured(LockAuditConfig)
    """How much the attackers have, and for how long they try."""


def run(args: Args) -> None:
    """Runs the attacks, prints the table and the strength, writes the page."""
    from situs.cli.locks.passphrase import read_key
    from situs.locks import audit_lock

    check_folder(args.out, "audit")
    asked = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in ("locked", "out")}
    asked["key"] = None if args.key is None else read_key(args.key)
    present(audit_lock(args.locked, **asked), args.out)
