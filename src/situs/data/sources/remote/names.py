"""Addresses: which are remote, how they are shown, and what a pattern stands for."""

from __future__ import annotations

import re
from itertools import product
from urllib.parse import urlsplit, urlunsplit

from situs.errors import DataError

_MOST = 100_000
_BRACES = re.compile(r"\{([^{}]*)\}")


def is_remote(path: object) -> bool:
    """Whether a path is an address of another place: https://…, s3://…"""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def redacted(text: str) -> str:
    """Text with the addresses in it as they may be shown: without user, password and query, which may hold a key."""
    return re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>()]+", lambda found: _bare(found[0]), text)


def _bare(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check_address(url: str) -> None:
    """Refuses a password: what is given as a path is kept in configs and shown in pages."""
    if "@" in urlsplit(url).netloc and urlsplit(url).scheme in {"http", "https", "ftp", "sftp"}:
        raise DataError(
            f"{redacted(url)}: was given with a user or a password, which a run would keep in its config; use a "
            "signed address, or fsspec's own configuration"
        )


def expand(pattern: str) -> list[str]:
    """The addresses that {000..099} and {a,b} stand for, in order; zeros in front are kept.

    >>> expand("s3://b/{train,val}-{8..10}.tar")[:3]
    ['s3://b/train-8.tar', 's3://b/train-9.tar', 's3://b/train-10.tar']
    """
    parts = _BRACES.split(pattern)
    choices = [[part] if number % 2 == 0 else _choices(part, pattern) for number, part in enumerate(parts)]
    count = 1
    for each in choices:
        count *= len(each)
    if count > _MOST:
        raise DataError(f"{redacted(pattern)}: stands for {count:,} addresses; at most {_MOST:,}")
    return ["".join(each) for each in product(*choices)]


def _choices(inner: str, pattern: str) -> list[str]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
    if span is None:
        if "," not in inner:
            raise DataError(f"{redacted(pattern)}: {{{inner}}} must be {{000..099}} or {{a,b}}")
        return inner.split(",")
    first, last = int(span[1]), int(span[2])
    if last < first or last - first >= _MOST:
        raise DataError(f"{redacted(pattern)}: {{{inner}}} must rise, by less than {_MOST:,}")
    width = len(span[1]) if len(span[1]) == len(span[2]) or span[1].startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]
