"""How a trainer becomes the writer of its run."""

from __future__ import annotations

import os
import secrets
import socket

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.errors import FencedError
from adapter_bucket.publish import RunWriter
from adapter_bucket.store import Store
from trl_async_bucket.settings import SyncSettings


def claim_run(
    store: Store, settings: SyncSettings, base_model: BaseModelRef, *, takeover: bool
) -> RunWriter:
    """Claim the run, with ``takeover`` also one marked running.

    Raises:
        FencedError: it belongs to another trainer; the message says how to take it over.
    """
    try:
        return RunWriter.claim(
            store,
            settings.run_id,
            base_model=base_model,
            window=settings.window,
            writer_id=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            takeover=takeover,
            keep_every=settings.keep_every,
        )
    except FencedError as error:
        if takeover:
            raise
        raise FencedError(f"{error} (bucket_takeover=True takes it over)") from error
