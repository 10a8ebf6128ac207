"""Permutation equivariance as a tool: verify it, lock a model with a key, and attack the lock.

new_key      Draws a key and writes it to a new file that only its owner may read.
load_key     The key in such a file.
lock         Locks a model with a key into a new folder.
unlock       Opens a locked folder with its key: the files that were locked, bit for bit.
unlocking    The `unlock` of `situs.models.open_model` for a locked folder and its key.
verify       Measures, on a model itself, which permutations of its tokens and channels it obeys.
audit_lock   Attacks a locked folder without its key and reports what is left of the lock.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from situs.locks.attacks.audit import audit_lock as audit_lock
    from situs.locks.equivariance.findings import verify as verify
    from situs.locks.key import load_key as load_key
    from situs.locks.key import new_key as new_key
    from situs.locks.locking import lock as lock
    from situs.locks.locking import unlock as unlock
    from situs.locks.owner import unlocking as unlocking

# Function -> its module, imported on first use: attacks import far more than a key needs.
_HOMES = {
    "audit_lock": "attacks.audit",
    "load_key": "key",
    "lock": "locking",
    "new_key": "key",
    "unlock": "locking",
    "unlocking": "owner",
    "verify": "equivariance.findings",
}

__all__ = [*_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
