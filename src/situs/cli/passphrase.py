"""Where a key's passphrase comes from: SITUS_PASSPHRASE, or a person at a terminal; never a flag that others see."""

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
    """A new passphrase: the variable's, or asked for twice."""
    from situs.locks.key import PASSPHRASE

    if given := os.environ.get(PASSPHRASE):
        return given
    first = _ask("Passphrase for the key: ")
    if not first:
        raise SitusError("an empty passphrase protects nothing", field="passphrase")
    if _ask("The same again: ") != first:
        raise SitusError("the two passphrases differ: no key was written", field="passphrase")
    return first


def read_key(path: Path) -> Key:
    """The key in a file, with its passphrase where it has one."""
    from situs.locks.key import PASSPHRASE, load_key, needs_passphrase

    wrapped = needs_passphrase(path)
    return load_key(path, (os.environ.get(PASSPHRASE) or _ask(f"Passphrase of {path}: ")) if wrapped else None)


def _ask(question: str) -> str:
    if not sys.stdin.isatty():
        raise SitusError("a passphrase is needed, and there is no terminal to ask at: set SITUS_PASSPHRASE")
    return getpass.getpass(question)
