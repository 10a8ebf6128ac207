"""Shards that lie elsewhere (http, https, s3, …): fetched when they are first needed, kept on disk within a limit."""

from situs.data.sources.remote.cache import USUAL_BYTES, check_unchanged, is_kept, mount, open_shard, opened, present
from situs.data.sources.remote.transfer import is_remote

__all__ = ["USUAL_BYTES", "check_unchanged", "is_kept", "is_remote", "mount", "open_shard", "opened", "present"]
