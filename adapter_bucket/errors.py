"""Every error the contract raises, arranged by what the caller can do about it.

::

    BucketError
    ├── ConfigError          fix the named setting and start again
    ├── NotPublished         wait: the version, or the run, is not in the bucket yet
    ├── IntegrityError       the bytes are not what the manifest promised; never load them
    ├── FencedError          another writer owns the run; this writer must stop
    ├── StoreUnavailable     the store did not answer well; the same call may succeed later
    │   └── StoreDenied      ... but not before somebody fixes credentials or permissions
    ├── PreconditionFailed   a conditional write lost: the object is not as the caller believed
    ├── ObjectNotFound       no object has this key
    └── UnsupportedUpstream  install a tested version of the named package

All of them survive pickling (they cross process boundaries in trainers and servers), because each
is built from its message alone.
"""

from __future__ import annotations


class BucketError(Exception):
    """Base of every error raised on purpose by this distribution."""


class ConfigError(BucketError):
    """A setting is wrong. The message names it, its value, the limit, and the change to make."""


class NotPublished(BucketError):
    """The version, or the run, is not (yet) in the bucket. Waiting can help."""


class IntegrityError(BucketError):
    """Bytes differ from what the manifest promised, or a document is malformed.

    The bytes must never be used. Keep the last good version and retry or report.
    """


class FencedError(BucketError):
    """Another writer owns the run. Nothing was written; this writer must stop publishing."""


class StoreUnavailable(BucketError):
    """The store failed or timed out after retries. The same call may succeed later."""


class StoreDenied(StoreUnavailable):
    """The store refused the credentials or the permission. Retrying cannot help by itself."""


class PreconditionFailed(BucketError):
    """A conditional write lost: the key exists, or its ETag is another one. Nothing was written."""


class ObjectNotFound(BucketError):
    """No object has this key. The message holds the key."""


class UnsupportedUpstream(BucketError):
    """An installed package is outside the tested range. The message lists that range."""
