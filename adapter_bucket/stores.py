"""From a bucket URL to a store: the one place that knows which schemes exist."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError
from adapter_bucket.store import Store

SCHEMES = ("file://", "s3://", "hf://", "memory://")


def open_store(url: str, **options: Any) -> Store:
    """Open the store at ``url`` and check that it can be reached.

    Args:
        url: ``file:///absolute/dir`` (created if its parent exists), ``s3://bucket/prefix`` or
            ``hf://buckets/owner/name`` with optional query settings (``s3_settings``), or
            ``memory://name`` within one process. For a mounted bucket use ``file://``.
        options: Fields of ``s3_settings.S3Settings``; they win over the URL.

    Raises:
        ConfigError: unknown scheme, missing bucket or parent directory, no credentials.
        StoreDenied: the credentials may not list the bucket.
        StoreUnavailable: the endpoint does not answer.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3" or (parts.scheme == "hf" and parts.netloc == "buckets"):
        from adapter_bucket.s3_store import S3Store

        return S3Store.open(url, **options)
    if options:
        raise ConfigError(f"bucket {parts.scheme}://… takes no options, got {sorted(options)}")
    if parts.scheme == "file":
        from adapter_bucket.file_store import FileStore

        return FileStore.open(url)
    if parts.scheme == "memory":
        from adapter_bucket.memory_store import MemoryStore

        return MemoryStore.open(url)
    hint = " (a plain path is written file:///path)" if not parts.scheme else ""
    raise ConfigError(
        f"bucket URL {url!r} has an unknown scheme {parts.scheme!r}{hint}; use one of "
        f"{', '.join(SCHEMES)}"
    )
