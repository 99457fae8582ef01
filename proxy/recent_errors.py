"""The last things that went wrong, for people. Bounded; the log has all of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from bucket_lora_proxy.errors import ApiError

MAX_ERRORS = 30
MAX_TEXT = 400


@dataclass
class RecentError:
    """One kind of error; equal ones are counted, not repeated."""

    subject: str
    """What failed: a replica's URL, or the type of an answer."""
    text: str
    count: int
    last_at: float
    """Unix time."""


class RecentErrors:
    """Keeps the last ``MAX_ERRORS`` different ones."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._errors: OrderedDict[tuple[str, str], RecentError] = OrderedDict()

    def add(self, subject: str, text: str) -> None:
        """Remember an error. Never a secret: messages of this program hold none."""
        key = (subject[:MAX_TEXT], text[:MAX_TEXT])
        known = self._errors.pop(key, None)
        count = known.count + 1 if known else 1
        self._errors[key] = RecentError(*key, count, self._clock())
        if len(self._errors) > MAX_ERRORS:
            self._errors.popitem(last=False)

    def remember(self, error: ApiError) -> None:
        """Remember what a client was told, unless it was the client's doing."""
        if error.status >= 500:
            self.add(f"{error.status} {error.type}", error.message)

    def newest_first(self) -> list[RecentError]:
        return list(reversed(self._errors.values()))
