"""A local stand-in for the Hugging Face Hub's Jobs API.

The real service cannot be reached from a test, costs money, and cannot be told to fail. This one
speaks the routes and documents that ``huggingface_hub`` 1.33 reads and writes (its source is the
reference); the launcher talks to it through the real client, by ``HF_ENDPOINT``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_fake_token_of_the_test"
CREATED = "2026-01-01T00:00:00.000Z"
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


@dataclass
class FakeJob:
    """A job and how it will go."""

    id: str
    spec: dict[str, Any]
    stage: str = "SCHEDULING"
    looks: int = 0
    message: str | None = None

    @property
    def name(self) -> str:
        return str(self.spec["labels"]["name"])

    @property
    def env(self) -> dict[str, str]:
        return dict(self.spec["environment"])

    @property
    def secrets(self) -> dict[str, str]:
        return dict(self.spec.get("secrets", {}))

    @property
    def shell(self) -> str:
        """The command line that the job's shell gets."""
        return str(self.spec["command"][-1])


@dataclass
class FakeHub:
    """The service. Change its fields before or while a launch runs."""

    jobs: list[FakeJob] = field(default_factory=list)
    buckets: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuse_start: str | None = None
    """End of the name of a job whose start answers 500."""
    lose_answer: str | None = None
    """End of the name of a job that starts, but whose answer is never sent."""
    fate: dict[str, str] = field(default_factory=dict)
    """Stage by end of the name: what a job becomes after some looks."""
    unhealthy: bool = False
    looks_before_end: int = 4
    cancel_faults: int = 0
    """Cancellations that answer 500 first."""
    state_faults: int = 0
    """Looks at jobs that answer 503 first."""
    log_lines: tuple[str, ...] = ("hello from the job",)
    url: str = ""
    changed: threading.Event = field(default_factory=threading.Event)

    def running(self) -> list[str]:
        return [job.name for job in self.jobs if job.stage not in ENDED]

    def job(self, end: str) -> FakeJob:
        (found,) = [job for job in self.jobs if job.name.endswith(end)]
        return found

    def look(self, job: FakeJob) -> None:
        """Let a job's life go on by one look."""
        job.looks += 1
        if job.stage in ENDED:
            return
        if job.looks >= 2:
            job.stage = "RUNNING"
        for end, stage in self.fate.items():
            if job.name.endswith(end) and job.looks >= self.looks_before_end:
                job.stage, job.message = stage, "as the test wants"

    def document(self, job: FakeJob) -> dict[str, Any]:
        exposed = [f"{self.url}/exposed/{job.id}"] if job.spec.get("expose") else None
        return {
            "id": job.id,
            "createdAt": CREATED,
            "dockerImage": job.spec.get("dockerImage"),
            "command": job.spec["command"],
            "arguments": [],
            "environment": job.spec["environment"],
            "flavor": job.spec["flavor"],
            "labels": job.spec["labels"],
            "status": {
                "stage": job.stage,
                "message": job.message,
                "exposeUrls": exposed if job.stage == "RUNNING" else None,
            },
            "owner": {"id": "1", "name": "me", "type": "user"},
        }


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = parts.path.strip("/").split("/")
        if not self._authorized():
            self._answer(401, {"error": "no token"})
        elif path == ["api", "whoami-v2"]:
            self._answer(200, {"name": "me", "type": "user"})
        elif path == ["api", "jobs", "hardware"]:
            self._answer(200, [_hardware("t4-small", 0.01), _hardware("a100-large", 0.04)])
        elif path[0] == "exposed":
            healthy = not self.hub.unhealthy and self._job(path[1]).stage == "RUNNING"
            self._answer(200 if healthy and path[2] == "health" else 503, {})
        elif path[:2] == ["api", "jobs"] and len(path) == 3:
            self._list(parse_qs(parts.query).get("label", []))
        elif path[:2] == ["api", "jobs"] and path[-1] == "logs":
            self._logs()
        else:
            self._look(self._job(path[3]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.strip("/").split("/")
        if not self._authorized():
            self._answer(401, {"error": "no token"})
        elif path[:2] == ["api", "buckets"]:
            self.hub.buckets["/".join(path[2:])] = json.loads(body)
            self._answer(200, {"url": f"{self.hub.url}/buckets/{'/'.join(path[2:])}"})
        elif path[-1] == "cancel":
            self._cancel(self._job(path[3]))
        else:
            self._start(json.loads(body))

    def _start(self, spec: dict[str, Any]) -> None:
        name = spec["labels"]["name"]
        if self.hub.refuse_start and name.endswith(self.hub.refuse_start):
            self._answer(500, {"error": "no machine"})
            return
        job = FakeJob(f"job{len(self.hub.jobs) + 1}", spec)
        self.hub.jobs.append(job)
        self.hub.changed.set()
        if self.hub.lose_answer and name.endswith(self.hub.lose_answer):
            self.close_connection = True
            return
        self._answer(200, self.hub.document(job))

    def _look(self, job: FakeJob) -> None:
        if self.hub.state_faults:
            self.hub.state_faults -= 1
            self._answer(503, {"error": "a moment, please"})
            return
        self.hub.look(job)
        self.hub.changed.set()
        self._answer(200, self.hub.document(job))

    def _list(self, labels: list[str]) -> None:
        wanted = dict(label.split("=", 1) for label in labels)
        found = [job for job in self.hub.jobs if wanted.items() <= job.spec["labels"].items()]
        self._answer(200, [self.hub.document(job) for job in found])

    def _cancel(self, job: FakeJob) -> None:
        if self.hub.cancel_faults:
            self.hub.cancel_faults -= 1
            self._answer(500, {"error": "not now"})
            return
        job.stage = "CANCELED"
        self._answer(200, {})

    def _logs(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for line in self.hub.log_lines:
            event = json.dumps({"timestamp": CREATED, "data": line})
            self.wfile.write(f"data: {event}\n\n".encode())

    def _job(self, job_id: str) -> FakeJob:
        return next(job for job in self.hub.jobs if job.id == job_id)

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _hardware(name: str, per_minute: float) -> dict[str, Any]:
    return {
        "name": name, "prettyName": name, "cpu": "4 vCPU", "ram": "15 GB", "accelerator": None,
        "unitCostMicroUSD": int(per_minute * 1e6), "unitCostUSD": per_minute, "unitLabel": "minute",
    }  # fmt: skip


@contextmanager
def serve() -> Iterator[FakeHub]:
    """Run the service on the loopback address."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
