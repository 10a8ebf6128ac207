"""Shards that lie elsewhere (http, https, s3, …): fetched when they are first needed, kept on disk within a limit."""

from situs.data.sources.remote.cache import is_kept, limit_bytes, mount, open_shard, opened, present
from situs.data.sources.remote.names import is_remote

__all__ = ["is_kept", "is_remote", "limit_bytes", "mount", "open_shard", "opened", "present"]
