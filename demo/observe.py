"""What the demo watches while it runs: the trainer's metrics file and the replicas' status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from adapter_bucket.layout import parse_adapter_name
from demo.fleet import Server

POLL_S = 0.5

_SENT_BY_REPLICA = "bucket_lora_proxy_replica_requests_total"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines written so far."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # the last part is empty, or a line being written
    return [json.loads(line) for line in lines]


def requests_by_replica(proxy: Server) -> dict[str, int]:
    """How many generations the proxy sent to each replica, by URL."""
    text = requests.get(f"{proxy.url}/metrics", timeout=5).text
    return {
        sample.labels["replica"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == _SENT_BY_REPLICA
    }


class ReadyLog:
    """Records which versions each replica reported ready, by polling its status."""

    def __init__(
        self,
        replicas: Mapping[str, Server],
        run_id: str,
        *,
        on_new: Callable[[str, int], None] = lambda _name, _version: None,
    ) -> None:
        self._replicas = dict(replicas)
        self._run_id = run_id
        self._on_new = on_new
        self._stop = threading.Event()
        self.versions: dict[str, set[int]] = {name: set() for name in replicas}
        self._thread = threading.Thread(target=self._run, name="ready-log", daemon=True)

    def __enter__(self) -> ReadyLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Ask every replica once."""
        for name, server in self._replicas.items():
            status = server.status()
            for adapter in status.ready if status else ():
                parsed = parse_adapter_name(adapter)
                if parsed and parsed[0] == self._run_id and parsed[1] not in self.versions[name]:
                    self.versions[name].add(parsed[1])
                    self._on_new(name, parsed[1])

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self.look()
