"""A store that notes when each call began and ended. The calls themselves are the real store's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from adapter_bucket.store import Store, StoredObject

REQUESTS = frozenset({"create", "replace", "overwrite", "get", "download", "list", "list_dirs"})


@dataclass(frozen=True)
class Call:
    """One call; times are of ``time.monotonic``, which all processes of a machine share."""

    name: str
    key: str
    began_at: float
    ended_at: float
    new: bool
    """A get that brought an object: not 304."""


class RecordedStore:
    """Passes every call on to ``store`` and appends it to ``calls``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls: list[Call] = []

    @property
    def as_store(self) -> Store:
        """This object, as what it behaves as."""
        return cast("Store", self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in REQUESTS:
            return method

        def timed(key: str, *arguments: Any, **options: Any) -> Any:
            began_at, found = time.monotonic(), None
            try:
                found = method(key, *arguments, **options)
                return found
            finally:
                new = isinstance(found, StoredObject)
                self.calls.append(Call(name, key, began_at, time.monotonic(), new))

        return timed
