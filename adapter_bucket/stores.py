"""From a bucket URL to a store: the one place that knows which schemes exist."""

from __future__ import annotations

from urllib.parse import urlsplit

from adapter_bucket.errors import ConfigError
from adapter_bucket.store import Store

SCHEMES = ("file://", "s3://")


def open_store(url: str) -> Store:
    """Open the store at ``url`` and check that it can be reached.

    Args:
        url: ``file:///absolute/dir`` (created if its parent exists) or ``s3://bucket/prefix``
            with optional query settings, see ``s3_store.parse_s3_url``.

    Raises:
        ConfigError: unknown scheme, missing bucket or parent directory, no credentials.
        StoreDenied: the credentials may not list the bucket.
        StoreUnavailable: the endpoint does not answer.
    """
    scheme = urlsplit(url).scheme
    if scheme == "file":
        from adapter_bucket.file_store import FileStore

        return FileStore.open(url)
    if scheme == "s3":
        from adapter_bucket.s3_store import S3Store

        return S3Store.open(url)
    hint = " (a plain path is written file:///path)" if not scheme else ""
    raise ConfigError(
        f"bucket URL {url!r} has an unknown scheme {scheme!r}{hint}; use one of "
        f"{', '.join(SCHEMES)}"
    )
