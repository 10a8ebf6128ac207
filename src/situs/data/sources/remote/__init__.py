"""Shards on servers (http, https, s3, …): fetched when they are first needed, cached on disk within a limit."""

from situs.data.sources.remote.cache import (
    DEFAULT_BYTES,
    check_unchanged,
    ensure_local,
    is_remote_shard,
    mount,
    open_remote,
    open_shard,
)
from situs.data.sources.remote.transfer import is_remote

__all__ = [
    "DEFAULT_BYTES",
    "check_unchanged",
    "ensure_local",
    "is_remote",
    "is_remote_shard",
    "mount",
    "open_remote",
    "open_shard",
]
