"""The one error a user's mistake raises. It stands below every room so that all of them may use it."""

from __future__ import annotations

from collections.abc import Iterable


class SitusError(ValueError):
    """A mistake in what the user gave: one sentence with the value, what is allowed, and the flag.

    The command line prints the sentence and exits with 2; a library caller sees an ordinary `ValueError`.
    """


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> SitusError:
    """The error for a name that is in no dict: the choices come from the dict itself, so they cannot go stale."""
    return SitusError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(choices))}")


def missing_extra(package: str, extra: str, purpose: str) -> SitusError:
    """The error for an optional dependency that is not installed."""
    return SitusError(f"{purpose} needs the package {package!r}: pip install 'situs[{extra}]'")
