"""The logs of all jobs on one terminal, each line with the job's name, secrets blotted out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

from trl_async_bucket.launch.hub import HUB_FAULTS, Hub

BLOT = "***"
MIN_SECRET_CHARS = 8
"""Shorter values would blot out ordinary words."""


class LogStreams:
    """One thread per job; lines are written whole."""

    def __init__(self, hub: Hub, secrets: Iterable[str]) -> None:
        self._hub = hub
        # The longest first: one may hold another.
        self._secrets = sorted({s for s in secrets if len(s) >= MIN_SECRET_CHARS}, key=len)[::-1]
        self._lock = threading.Lock()

    def follow(self, name: str, job_id: str) -> None:
        """Show the job's log from now on until it ends."""
        threading.Thread(
            target=self._pump, args=(name, job_id), name=f"log-{name}", daemon=True
        ).start()

    def write(self, name: str, text: str) -> None:
        """Write a line."""
        for secret in self._secrets:
            text = text.replace(secret, BLOT)
        with self._lock:
            print(f"{name} | {text}", file=sys.stdout, flush=True)

    def _pump(self, name: str, job_id: str) -> None:
        try:
            for line in self._hub.logs(job_id):
                self.write(name, line.rstrip("\n"))
        except HUB_FAULTS as error:
            self.write(name, f"(its log cannot be shown any more: {error})")
