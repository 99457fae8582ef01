"""Each fault: how it begins, how long it lasts, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from demo.processes import Child
from tests.faults.matrix.cells import Cell
from tests.faults.matrix.corruption import corrupt
from tests.faults.matrix.links import Answer, Refuse, Request
from tests.faults.matrix.moments import VICTIM
from tests.faults.matrix.recorder import Record
from tests.faults.matrix.trainers import Life
from tests.faults.matrix.world import World, wait_for

STOPPED_S = 30.0
CUT_S = 12.0
LATENCY_S = 0.5
WRITES = ("PUT", "POST", "DELETE")
HOUR_S = 3600.0
EXPIRES_AFTER_S = 15.0
"""Longer than the proxy takes to start: it refuses a certificate that has expired already."""


@dataclass
class Scene:
    """Where a fault happens."""

    world: World
    record: Record
    life: Life
    """The trainer."""
    phase: str
    second: Life | None = None
    """Another trainer of the run, which waits before its claim."""
    replaced_by: Life | None = None
    """The trainer that goes on in the trainer's place."""
    hold_factor: float = 1.0
    """Shortens what lasts, for quick tests."""

    def hold(self, seconds: float) -> None:
        """Let the fault last."""
        time.sleep(seconds * self.hold_factor)


Released = Callable[[], None]


class NotPossibleHere(Exception):
    """This machine lacks something; the text says what."""


def inflict(cell: Cell, scene: Scene, release: Released) -> None:
    """Do it, from its beginning to its end.

    Args:
        cell: Which.
        scene: On what.
        release: To be called once the fault is there: the event that waits for it goes on.

    Raises:
        NotPossibleHere: not on this machine.
    """
    name, target = cell.fault.name, cell.fault.target
    if name == "kill":
        _kill(target, scene, release)
    elif name == "stop":
        _stop(target, scene, release)
    elif name in _LASTING:
        seconds, begin = _LASTING[name]
        with begin(target, scene):
            release()
            scene.hold(seconds)
    elif name == "corrupt":
        corrupt(scene, release)
    elif name == "certificate":
        _certificate(scene, release)
    elif name.startswith("token"):
        _token(scene, release, overlap=name == "token-overlap")
    elif name == "second-trainer":
        _second_trainer(scene, release)
    elif name == "second-trainer-refused":
        _second_trainer_refused(scene, release)
    else:
        raise ValueError(f"no such fault: {name}")


def _child(target: str, scene: Scene) -> Child:
    world = scene.world
    if target == "replica":
        return world.replicas[VICTIM].child
    child: Child = world.proxy.process if target == "proxy" else world.s3.child
    return child


def _kill(target: str, scene: Scene, release: Released) -> None:
    world = scene.world
    if target == "trainer":
        scene.life.kill()
        release()
        return
    _child(target, scene).kill()
    release()
    if target == "replica":
        world.start_replica(VICTIM)
    elif target == "proxy":
        scene.hold(1.0)
        world.proxy.start()
    else:
        scene.hold(3.0)
        world.restart_store()


def _stop(target: str, scene: Scene, release: Released) -> None:
    group = scene.life.pid if target == "trainer" else _child(target, scene).pid
    os.killpg(group, signal.SIGSTOP)
    try:
        release()
        scene.hold(STOPPED_S)
    finally:
        os.killpg(group, signal.SIGCONT)


@contextmanager
def _cut(target: str, scene: Scene) -> Iterator[None]:
    world = scene.world
    link = {
        "trainer-store": world.store_links["trainer"],
        "replica-store": world.store_links[VICTIM],
        "trainer-proxy": world.trainer_proxy,
        "proxy-replica": world.replica_links[VICTIM],
    }[target]
    link.cut()
    try:
        yield
    finally:
        link.mend()


@contextmanager
def _latency(_target: str, scene: Scene) -> Iterator[None]:
    links = scene.world.store_links.values()
    for link in links:
        link.latency_s = LATENCY_S
    try:
        yield
    finally:
        for link in links:
            link.latency_s = 0.0


def _s3_error(status: int, code: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer(
        status,
        [(b"content-type", b"application/xml"), (b"content-length", str(len(body)).encode())],
        body,
    )


@contextmanager
def _refusing(scene: Scene, refuse: Refuse) -> Iterator[None]:
    links = scene.world.store_links.values()
    for link in links:
        link.refuse = refuse
    try:
        yield
    finally:
        for link in links:
            link.refuse = lambda _request: None


@contextmanager
def _busy(_target: str, scene: Scene) -> Iterator[None]:
    with _refusing(scene, lambda _request: _s3_error(503, "SlowDown")):
        yield


@contextmanager
def _read_only(_target: str, scene: Scene) -> Iterator[None]:
    def refuse(request: Request) -> Answer | None:
        return _s3_error(403, "AccessDenied") if request.method in WRITES else None

    with _refusing(scene, refuse):
        yield


@contextmanager
def _clock(target: str, scene: Scene) -> Iterator[None]:
    name = VICTIM if target == "replica" else target
    clock = scene.world.clocks.get(name)
    if clock is None:
        raise NotPossibleHere("no C compiler: a process's clock cannot be moved")
    clock.move(HOUR_S)
    try:
        yield
    finally:
        clock.move(0.0)


@contextmanager
def _full_disk(_target: str, scene: Scene) -> Iterator[None]:
    name = VICTIM if scene.phase in ("load", "generation") else "trainer"
    disk = scene.world.disks[name]
    if not disk.can_be_full:
        raise NotPossibleHere("not root: no small disk can be mounted")
    disk.fill()
    try:
        yield
    finally:
        disk.free()


_LASTING = {
    "cut": (CUT_S, _cut),
    "latency": (10.0, _latency),
    "503": (10.0, _busy),
    "read-only": (8.0, _read_only),
    "clock": (10.0, _clock),
    "disk": (8.0, _full_disk),
}


def _certificate(scene: Scene, release: Released) -> None:
    proxy = scene.world.proxy
    proxy.write(valid_s=EXPIRES_AFTER_S)
    expires_at = time.monotonic() + EXPIRES_AFTER_S
    proxy.restart()
    time.sleep(max(expires_at - time.monotonic() + 1.0, 0.0))
    if proxy.process.process.poll() is not None:
        raise RuntimeError("the proxy did not start before its certificate expired")
    # Handshakes of before would go on for as long as their connections are kept.
    scene.world.trainer_proxy.reset()
    release()
    scene.hold(15.0)
    proxy.write()
    proxy.restart()


def _token(scene: Scene, release: Released, *, overlap: bool) -> None:
    proxy = scene.world.proxy
    old, proxy.token = proxy.token, os.urandom(16).hex()
    proxy.write(also=old if overlap else None)
    proxy.restart()
    release()


def _second_trainer(scene: Scene, release: Released) -> None:
    second = scene.second
    assert second is not None
    scene.world.hub.let_go(second.name)
    wait_for(
        "the second trainer's claim",
        lambda: bool(scene.record.of("began", life=second.name)) or second.ended.is_set(),
        timeout_s=60,
    )
    scene.replaced_by = second
    release()


def _second_trainer_refused(scene: Scene, release: Released) -> None:
    second = scene.second
    assert second is not None
    scene.world.hub.let_go(second.name)
    if not second.ended.wait(60) or second.code == 0:
        second.kill()
        raise RuntimeError("a second trainer was not refused")
    stopped = scene.record.of("stopped", life=second.name)
    if not stopped or not stopped[-1]["stopped"].startswith("FencedError: "):
        raise RuntimeError(f"the second trainer ended without a named error: {stopped}")
    release()
