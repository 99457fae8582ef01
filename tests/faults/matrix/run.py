"""One training run that meets a fault in one phase after the other, and is begun again if it ends.

The harness is what a scheduler of spot machines is: it starts ``--resume bucket`` on a new machine
whenever a trainer ended, and does nothing else. A cell is over when training has provably gone on:
a version from after the fault is ready on both replicas, completions of it were answered, and
further steps were trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from adapter_bucket.errors import NotPublished
from adapter_bucket.lifecycle import finish_run
from adapter_bucket.s3_store import S3Store
from tests.faults.matrix.cells import Cell, may_stop
from tests.faults.matrix.checker import Checks, check_record
from tests.faults.matrix.faults import NotPossibleHere, Scene, inflict
from tests.faults.matrix.recorder import ReadyWatch, Record, name_of
from tests.faults.matrix.resources import Usage, check_resources
from tests.faults.matrix.trainers import Life
from tests.faults.matrix.world import World, wait_for

START_S = 240.0
RECOVER_S = 240.0
"""vLLM alone takes a minute or two to start on busy cores."""
STEPS_AFTER = 3
"""So many optimizer steps after a fault say that training goes on."""
FIRST_VERSIONS = 8
"""A run is under way, and has a checkpoint, before the first fault."""
END_S = 90.0


@dataclass
class Result:
    """What came of a cell."""

    key: str
    outcome: str
    """``went on``, ``went on after restart``, ``stopped: <error>, went on after restart``,
    ``failed: <why>`` or ``not possible here: <why>``."""
    recovery_s: float | None = None
    """From the end of the fault until training had gone on."""
    restarts: int = 0
    begun_at: float = 0.0

    @property
    def good(self) -> bool:
        return not self.outcome.startswith("failed")


@dataclass
class RunOutcome:
    """What came of a run."""

    results: list[Result]
    checks: Checks
    problems: list[str] = field(default_factory=list)


class Run:
    """A training run on a world.

    Args:
        world: Where.
        run_id: Its name in the bucket.
        hold_factor: Shortens what lasts.
        say: Told what happens.
    """

    def __init__(
        self, world: World, run_id: str, *, hold_factor: float, say: Callable[[str], None]
    ) -> None:
        self._world = world
        self._say = say
        self._hold_factor = hold_factor
        self._lives = 0
        self._all: list[Life] = []
        self.record = Record(run_id, world.out / "weights" / run_id)
        world.recorder.begin(self.record)
        world.hub.record, world.hub.finishing = self.record, False
        self._life = self._start("bucket")

    def meet(self, cells: Iterable[Cell], *, before: dict[str, Usage], until: float) -> RunOutcome:
        """Meet the cells, end the run, check everything.

        Args:
            before: What the servers used when they were fresh.
            until: Begin no cell after that, by the monotonic clock.
        """
        results: list[Result] = []
        problems: list[str] = []
        with ReadyWatch(self.record, self._world.replicas):
            try:
                wait_for("the run to begin", self._under_way, timeout_s=START_S)
                for cell in cells:
                    if time.monotonic() > until:
                        break
                    results.append(self._meet(cell))
                    self._say(f"{cell.key}: {results[-1].outcome} {results[-1].recovery_s}")
                    if not results[-1].good:
                        break  # what follows would be blamed for it
                self._finish()
            except RuntimeError as error:
                problems.append(f"{error}; {self._last_words()}")
                self._life.kill()
                self._give_up()
        for life in self._all:
            if not life.ended.is_set():
                problems.append(f"trainer {life.name} still runs")
                life.kill()
        problems += check_resources(self._world, self.record, self._all, before)
        checks = check_record(self.record, self._world.model)
        problems += checks.problems
        _blame(results, problems, checks)
        return RunOutcome(results, checks, problems)

    def _under_way(self) -> bool:
        if self._life.ended.is_set():
            raise RuntimeError(f"the trainer ended with code {self._life.code}")
        newest = self.record.newest_ready
        ready = all(newest.get(name, 0) >= FIRST_VERSIONS for name in self._world.replicas)
        return ready and len(self.record.of("step")) >= FIRST_VERSIONS

    def _meet(self, cell: Cell) -> Result:
        world, moments = self._world, self._world.moments
        scene = Scene(world, self.record, self._life, cell.phase, hold_factor=self._hold_factor)
        if cell.fault.name.startswith("second-trainer"):
            scene.second = self._start(
                None if cell.fault.name.endswith("refused") else "bucket", waits=True
            )
        result = Result(cell.key, "failed: it was not brought to its end", begun_at=time.time())
        if cell.fault.name in ("corrupt", "kill") and cell.phase == "checkpoint":
            # One committed checkpoint to go back to, beside the one that is damaged or unfinished.
            wait_for("two checkpoints", self._two_checkpoints, timeout_s=60)
        moments.arm(cell.phase)
        try:
            moments.wait()
            result.begun_at = time.time()
            inflict(cell, scene, moments.release)
        except NotPossibleHere as error:
            result.outcome = f"not possible here: {error}"
            return result
        except Exception as error:  # the boundary of a cell: whatever it is, the cell has failed
            result.outcome = f"failed: {type(error).__name__}: {error}"
            return result
        finally:
            moments.release()
        # A start of vLLM is some 20 s of a core, of which training leaves little on two.
        world.hub.slowly = cell.fault.key == "kill/replica"
        try:
            return self._recover(cell, scene, result)
        finally:
            world.hub.slowly = False

    def _recover(self, cell: Cell, scene: Scene, result: Result) -> Result:
        ended_at = time.monotonic()
        stopped: list[str] = []
        if scene.replaced_by is not None:
            if not self._life.ended.wait(60):
                self._life.kill()
                result.outcome = "failed: the first trainer was not fenced"
                return result
            stopped.append(self._error(self._life))
            self._life = scene.replaced_by
        since = time.time()
        newest = max((event["version"] for event in self.record.of("step")), default=0)
        deadline = time.monotonic() + RECOVER_S
        while not self._gone_on(newest, since):
            if time.monotonic() > deadline:
                result.outcome = f"failed: not gone on after {RECOVER_S:.0f} s; {self._state()}"
                return result
            if self._life.ended.is_set():
                error = self._error(self._life)
                killed = cell.fault.name in ("kill", "corrupt") and self._life.code == -9
                if not killed:
                    stopped.append(error)
                    if not may_stop(cell.fault, error):
                        result.outcome = f"failed: stopped by {error}"
                        if len(stopped) > 1:
                            return result
                result.restarts += 1
                if result.restarts > 3:
                    result.outcome = f"failed: stopped again and again, last by {error}"
                    return result
                self._life = self._start("bucket")
            time.sleep(0.1)
        result.recovery_s = round(time.monotonic() - ended_at, 1)
        if any(not may_stop(cell.fault, error) for error in stopped):
            return result
        if cell.fault.must_stop and not stopped and not result.restarts:
            result.outcome = "failed: it went on as if nothing had happened"
        elif stopped:
            shown = ", ".join(error.partition(":")[0] for error in dict.fromkeys(stopped))
            who = "the other trainer went on" if scene.replaced_by else "went on after restart"
            result.outcome = f"stopped: {shown}; {who}"
        else:
            result.outcome = "went on after restart" if result.restarts else "went on"
        return result

    def _gone_on(self, newest: int, since: float) -> bool:
        record = self.record
        steps = [event for event in record.of("step", life=self._life.name) if event["at"] > since]
        if len(steps) < STEPS_AFTER:
            return False
        ready = record.newest_ready
        if not all(ready.get(name, 0) > newest for name in self._world.replicas):
            return False
        names = {name_of(record.run_id, version) for version in range(newest + 1, newest + 1000)}
        return any(g.model in names for g in reversed(record.generations[-200:]))

    def _two_checkpoints(self) -> bool:
        found = self._world.store.list_objects_v2(
            Bucket=self._world.bucket, Prefix=f"demo/runs/{self.record.run_id}/checkpoints/"
        ).get("Contents", [])
        keys = [item["Key"] for item in found]
        return sum(k.endswith(".json") and "/e" in k and k.count("/") == 5 for k in keys) >= 2

    def _start(self, resume: str | None, *, waits: bool = False) -> Life:
        world = self._world
        self._lives += 1
        name = f"{self.record.run_id}-{self._lives}"
        if waits:
            world.hub.keep(name)
        life = world.trainers.start(
            name, world.disks["trainer"].path / name,
            "--model", str(world.model), "--server", world.server_url,
            "--bucket", world.url_through("trainer"), "--run-id", self.record.run_id,
            "--hub", str(world.hub.port), *(("--resume", resume) if resume else ()),
        )  # fmt: skip
        self._all.append(life)
        if waits:
            wait_for(
                "the second trainer",
                lambda: bool(self.record.of("before_training", life=name)),
                timeout_s=60,
            )
        return life

    def _finish(self) -> None:
        """End the run in good order."""
        self._world.hub.finishing = True
        if not self._life.ended.wait(END_S):
            raise RuntimeError(f"the trainer did not end within {END_S:.0f} s")
        if self._life.code != 0:
            raise RuntimeError(f"the trainer ended with code {self._life.code}")

    def _give_up(self) -> None:
        """As an operator does with a run that nobody trains any more: it frees its slots."""
        env = self._world.s3.env
        store = S3Store.open(
            self._world.s3.url,
            access_key_id=env["AWS_ACCESS_KEY_ID"],
            secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        )
        with suppress(NotPublished):
            finish_run(store, self.record.run_id, by="fault matrix")

    def _error(self, life: Life) -> str:
        """What it said when it stopped."""
        said = self.record.of("stopped", life=life.name)
        return said[-1]["stopped"] if said else f"no word, code {life.code}"

    def _state(self) -> str:
        steps = self.record.of("step")
        return f"{len(steps)} steps, ready {self.record.newest_ready}; {self._last_words()}"

    def _last_words(self) -> str:
        return f"trainer {self._life.name}: {self._error(self._life)}, log {self._life.log}"


def run_cells(
    world: World,
    cells: list[Cell],
    run_id: str,
    *,
    before: dict[str, Usage],
    hold_factor: float = 1.0,
    until: float = math.inf,
    say: Callable[[str], None] = print,
) -> RunOutcome:
    """Meet the cells in one training run."""
    run = Run(world, run_id, hold_factor=hold_factor, say=say)
    return run.meet(cells, before=before, until=until)


def _blame(results: list[Result], problems: list[str], checks: Checks) -> None:
    """A problem fails the cell in whose time it fell, or else all of them."""
    for problem in problems:
        at = checks.times.get(problem)
        guilty = [r for r in results if at is not None and r.begun_at <= at][-1:] or results
        for result in guilty:
            if result.good:
                result.outcome = f"failed: {problem}"
