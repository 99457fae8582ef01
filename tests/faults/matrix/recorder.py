"""What all processes did, as seen from outside of them.

Links show every request and answer, the trainer's script says what it trains on, and a thread asks
the replicas what they have ready. Nothing here judges; that is ``checker``'s.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapter_bucket.layout import WEIGHTS_FILE, adapter_name, parse_adapter_name, version_dir
from demo.fleet import Server
from tests.faults.matrix.links import Answer, HttpLink, Observer, Request
from tests.faults.matrix.moments import Moments

POLL_S = 0.3


@dataclass(frozen=True)
class Generation:
    """A completion that a replica answered with."""

    at: float
    replica: str
    model: str
    """The name in the request."""
    answered_model: str
    """The name in the answer."""
    seed: int
    """Of the request: unlike any other rollout's, and the same when it is sent again."""
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trained:
    """A rollout that the trainer took out of its queue, as fresh enough to be trained on."""

    at: float
    life: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Committed:
    """A manifest that the store took."""

    at: float
    epoch: int
    latest: int
    state: str
    files: dict[int, str]
    """sha256 of each version's weights."""


@dataclass(frozen=True)
class Seen:
    """What a replica said of the run."""

    at: float
    replica: str
    ready: tuple[int, ...]


@dataclass
class Record:
    """Everything seen of one run."""

    run_id: str
    folder: Path
    """Weights that were sent to the bucket: ``<folder>/<sha256>``."""
    generations: list[Generation] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """What trainers said: ``life``, ``at``, and what happened."""
    broken: list[str] = field(default_factory=list)
    """What could not be recorded; anything here fails the run."""

    def of(self, kind: str, *, life: str | None = None) -> list[dict[str, Any]]:
        """Events that have this key, in order."""
        return [
            event
            for event in list(self.events)
            if kind in event and (life is None or event["life"] == life)
        ]

    @property
    def newest_ready(self) -> dict[str, int]:
        """By replica: the newest version in its last answer."""
        newest: dict[str, int] = {}
        for seen in list(self.seen):
            newest[seen.replica] = max(seen.ready, default=0)
        return newest


def weights_key(run_id: str, version: int) -> re.Pattern[str]:
    """Paths of a version's weights in any bucket and prefix."""
    return re.compile(
        rf"/runs/{re.escape(run_id)}/adapters/{version_dir(version)}/{re.escape(WEIGHTS_FILE)}$"
    )


class Recorder(Observer):
    """Fills a ``Record`` from what passes the links."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._record: Record | None = None

    def begin(self, record: Record) -> None:
        """Record this run from now on; nothing of another run gets into it."""
        record.folder.mkdir(parents=True, exist_ok=True)
        self._record = record

    async def passing(self, link: HttpLink, request: Request) -> None:
        record = self._record
        if record is None or f"{record.run_id}" not in request.path + request.body[:300].decode(
            "latin-1"
        ):
            return
        path = request.path.partition("?")[0]
        if request.method == "PUT" and path.endswith(WEIGHTS_FILE):
            digest = hashlib.sha256(request.body).hexdigest()
            (record.folder / digest).write_bytes(request.body)
        await self._moments.passing(link, request)

    def answered(self, link: HttpLink, request: Request, answer: Answer) -> None:
        record = self._record
        if record is None or answer.status != 200:
            return
        path = request.path.partition("?")[0]
        try:
            if path == "/v1/completions":
                self._completion(record, link, request, answer)
            elif request.method == "PUT" and path.endswith(f"/runs/{record.run_id}/manifest.json"):
                record.committed.append(_committed(json.loads(request.body)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            record.broken.append(f"{link.name} {path}: {type(error).__name__}: {error}")

    def _completion(self, record: Record, link: HttpLink, request: Request, answer: Answer) -> None:
        asked, given = json.loads(request.body), json.loads(answer.body)
        parsed = parse_adapter_name(asked["model"])
        if parsed is None or parsed[0] != record.run_id:
            return
        (choice,) = given["choices"]
        record.generations.append(
            Generation(
                time.time(), link.name, asked["model"], given["model"], asked["seed"],
                tuple(asked["prompt"]), tuple(choice["token_ids"]),
                tuple(choice["logprobs"]["token_logprobs"]),
            )
        )  # fmt: skip


def _committed(manifest: dict[str, Any]) -> Committed:
    files = {
        entry["version"]: entry["files"][WEIGHTS_FILE]["sha256"] for entry in manifest["versions"]
    }
    return Committed(
        time.time(), manifest["writer"]["epoch"], manifest["latest"], manifest["state"], files
    )


def trained(event: dict[str, Any]) -> Trained:
    """From what the trainer's script says of a rollout that it takes."""
    mask = event["mask"]
    start = mask.index(1)
    # Float32 as the trainer holds them, so that equal means equal.
    logprobs = np.asarray(event["logprobs"][start:], dtype=np.float32)
    return Trained(
        event["at"], event["life"], tuple(event["ids"][:start]), tuple(event["ids"][start:]),
        tuple(float(value) for value in logprobs),
    )  # fmt: skip


class ReadyWatch:
    """Asks the replicas all the time what they have ready. A context manager."""

    def __init__(self, record: Record, replicas: dict[str, Server]) -> None:
        self._record = record
        self._replicas = replicas
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name,), daemon=True) for name in replicas
        ]

    def __enter__(self) -> ReadyWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    def _run(self, name: str) -> None:
        while not self._stop.wait(POLL_S):
            status = self._replicas[name].status()
            if status is None:
                self._record.seen.append(Seen(time.time(), name, ()))
                continue
            parsed = [parse_adapter_name(adapter) for adapter in status.ready]
            ready = sorted(p[1] for p in parsed if p is not None and p[0] == self._record.run_id)
            self._record.seen.append(Seen(time.time(), name, tuple(ready)))


def name_of(run_id: str, version: int) -> str:
    """The model name that stands for a version."""
    return adapter_name(run_id, version)
