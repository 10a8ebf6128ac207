"""Reads a key's passphrase from SITUS_PASSPHRASE or the terminal; never from a flag, which other users could see."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.locks.key import Key


def choose_passphrase() -> str:
    """A new passphrase: from SITUS_PASSPHRASE, or asked for twice."""
    from situs.locks.key import PASSPHRASE

    if from_environment := os.environ.get(PASSPHRASE):
        return from_environment
    first = _ask("Passphrase for the key: ")
    if not first:
        raise SitusError("an empty passphrase protects nothing", field="passphrase")
    if _ask("Repeat it: ") != first:
        raise SitusError("the two passphrases differ: no key was written", field="passphrase")
    return first


def read_key(path: Path) -> Key:
    """The key in a file; asks for its passphrase if it has one."""
    from situs.locks.key import PASSPHRASE, load_key, needs_passphrase

    wrapped = needs_passphrase(path)
    return load_key(path, (os.environ.get(PASSPHRASE) or _ask(f"Passphrase of {path}: ")) if wrapped else None)


def _ask(question: str) -> str:
    if not sys.stdin.isatty():
        raise SitusError("the key needs a passphrase and there is no terminal to ask for it: set SITUS_PASSPHRASE")
    return getpass.getpass(question)
