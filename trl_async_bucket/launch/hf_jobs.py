"""A whole run on Hugging Face Jobs: start, wait, watch, and always take down.

Order: replicas, until they answer; then the trainer, so that its hardware is not paid for while
models load. Whatever ends the launch, a signal included, every job of it is cancelled: signals are
noted and acted on between calls, so that no job is started whose id is lost, and at the end the
Hub is asked for all jobs that carry the launch's label.
"""

from __future__ import annotations

import os
import secrets as random_source
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from adapter_bucket.errors import ConfigError
from trl_async_bucket.launch.cost import cost_line
from trl_async_bucket.launch.hub import HUB_FAULTS, Hub, JobState, LaunchError
from trl_async_bucket.launch.job_plan import (
    TOKEN_NAME,
    Job,
    check_no_secret,
    describe,
    hf_bucket,
    replica_jobs,
    secret_names,
    trainer_job,
)
from trl_async_bucket.launch.log_stream import LogStreams
from trl_async_bucket.launch.run_config import RunConfig, load

POLL_S = 5.0
"""Pause between two looks at the jobs: far below the time in which a job changes."""
MAX_FAULTS = 12
"""Looks in a row that may fail: a minute of a Hub that does not answer."""
CANCEL_TRIES = 4
PLACEHOLDER = "https://<replica-{}>--8000.hf.jobs"


Result = TypeVar("Result")


class Stopped(Exception):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def launch(
    path: Path, *, dry_run: bool, poll_s: float = POLL_S, endpoint: str | None = None
) -> int:
    """Start the run that the file describes, and see it to its end.

    Returns:
        0 when the trainer's job completed, 1 when the run failed, 128 + N after signal N.

    Raises:
        ConfigError: something in the file or the environment is wrong; nothing was started.
    """
    config = load(path)
    replicas = replica_jobs(config)
    trainer = trainer_job(
        config, [PLACEHOLDER.format(number) for number in range(1, len(replicas) + 1)]
    )
    jobs = [*replicas, trainer]
    if dry_run:
        check_no_secret(config, jobs, _given(config))
        print("\n".join(describe(job) for job in jobs))
        print(cost_line(jobs, _prices_if_known(config)))
        return 0
    launch_id = random_source.token_hex(6)
    hub = Hub(config.namespace, launch_id, endpoint=endpoint)
    values = _secrets(config, hub.token)
    check_no_secret(config, jobs, values)
    try:
        prices = hub.hourly_prices()
    except HUB_FAULTS as error:
        raise LaunchError(f"the Hub's hardware cannot be listed: {error}") from None
    print(cost_line(jobs, prices), flush=True)
    return _Launch(config, hub, values, poll_s).run()


def _given(config: RunConfig) -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in secret_names(config)}


def _secrets(config: RunConfig, token: str) -> dict[str, str]:
    values = {**_given(config), TOKEN_NAME: token}
    if missing := sorted(name for name, value in values.items() if not value):
        raise ConfigError(
            f"{missing[0]} is listed in secrets and is not set in this shell; export it"
        )
    return values


def _prices_if_known(config: RunConfig) -> dict[str, float]:
    try:
        return Hub(config.namespace, "dry-run").hourly_prices()
    except (ConfigError, *HUB_FAULTS):
        return {}  # a dry run works without network; the line says that prices are unknown


def _is_refusal(error: Exception) -> bool:
    """Whether asking again cannot help: the Hub answered, and it was not its own fault."""
    answer = getattr(error, "response", None)
    return answer is not None and 400 <= answer.status_code < 500 and answer.status_code != 429


class _Launch:
    """One launch from its first job to its last."""

    def __init__(
        self, config: RunConfig, hub: Hub, values: Mapping[str, str], poll_s: float
    ) -> None:
        self._config = config
        self._poll_s = poll_s
        self._hub = hub
        self._values = values
        self._streams = LogStreams(hub, values.values())
        self._started: dict[str, JobState] = {}
        """By the job's name."""
        self._followed: set[str] = set()
        self._signal = 0
        self._woken = threading.Event()

    def run(self) -> int:
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        code = 1
        try:
            code = self._see_through()
        except Stopped as stop:
            self._say(f"{stop}: cancelling all jobs")
            code = 128 + stop.number
        except (LaunchError, *HUB_FAULTS) as error:
            self._say(f"failed: {error}")
        finally:
            left = self._cancel_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        return code if not left else max(code, 1)

    def _see_through(self) -> int:
        bucket = hf_bucket(self._config)
        if bucket is not None:
            self._call(partial(self._hub.make_bucket, bucket), f"making bucket {bucket.source}")
        replicas = replica_jobs(self._config)
        for job in replicas:
            self._start(job)
        urls = self._wait_healthy([job.name for job in replicas])
        trainer = trainer_job(self._config, urls)
        self._start(trainer)
        return self._watch(trainer.name)

    def _start(self, job: Job) -> None:
        self._check_signal()
        # Not repeated on a fault: the job may have started although its answer was lost.
        try:
            state = self._hub.start(job, self._values)
        except HUB_FAULTS as error:
            raise LaunchError(f"{job.name} could not be started: {error}") from None
        self._started[job.name] = state
        self._say(f"{job.name} is job {state.id}: {state.url}")

    def _wait_healthy(self, names: list[str]) -> list[str]:
        """Wait for enough replicas. Returns the addresses of all that have one, in order."""
        needed = self._config.min_replicas or len(names)
        deadline = time.monotonic() + self._config.ready_timeout_s
        healthy: set[str] = set()
        while True:
            for name in names:
                state = self._look(name)
                if state.ended:
                    raise LaunchError(self._how_it_ended(name, state))
                if name not in healthy and state.exposed and self._hub.is_healthy(state.exposed):
                    healthy.add(name)
                    self._say(f"{name} is healthy ({len(healthy)} of {len(names)})")
            if len(healthy) >= needed:
                return [url for name in names if (url := self._started[name].exposed)]
            if time.monotonic() > deadline:
                stages = ", ".join(f"{name} {self._started[name].stage}" for name in names)
                raise LaunchError(
                    f"{len(healthy)} of {needed} replicas were healthy within "
                    f"{self._config.ready_timeout_s:g} s (ready_timeout_s): {stages}"
                )
            self._pause()

    def _watch(self, trainer: str) -> int:
        """Until the trainer's job ends."""
        lost: set[str] = set()
        while True:
            for name in self._started:
                state = self._look(name)
                if not state.ended or name in lost:
                    continue
                if name == trainer:
                    self._say(self._how_it_ended(name, state))
                    return 0 if state.stage == "COMPLETED" else 1
                lost.add(name)
                self._say(f"{self._how_it_ended(name, state)}; the others go on")
                if len(lost) == len(self._started) - 1:
                    raise LaunchError("no replica is left")
            self._pause()

    def _look(self, name: str) -> JobState:
        job_id = self._started[name].id
        state = self._call(partial(self._hub.state, job_id), f"looking at {name}")
        self._started[name] = state
        if name not in self._followed and state.stage != "SCHEDULING":
            # Not before: the Hub's client takes a scheduled job for one that has ended.
            self._followed.add(name)
            self._streams.follow(name, job_id)
        return state

    def _call(self, call: Callable[[], Result], what: str) -> Result:
        """Make a call that may be repeated, through short failures of the Hub."""
        for attempt in range(1, MAX_FAULTS + 1):
            try:
                return call()
            except HUB_FAULTS as error:
                if attempt == MAX_FAULTS or _is_refusal(error):
                    raise LaunchError(f"{what} failed: {error}") from None
            self._pause()
        raise AssertionError("unreachable")

    def _how_it_ended(self, name: str, state: JobState) -> str:
        return f"{name} ended as {state.stage}{f' ({state.message})' if state.message else ''}"

    def _cancel_all(self) -> list[str]:
        """Cancel what runs; returns the ids that could not be cancelled."""
        ids = {state.id: None for state in self._started.values() if not state.ended}
        for attempt in range(CANCEL_TRIES):
            if attempt:
                time.sleep(self._poll_s)
            listed = self._add_unknown(ids)
            for job_id in list(ids):
                try:
                    self._hub.cancel(job_id)
                    del ids[job_id]
                    self._say(f"cancelled job {job_id}")
                except HUB_FAULTS as error:
                    self._say(f"job {job_id} cannot be cancelled: {error}")
            if listed and not ids:
                break
        for job_id in ids:
            self._say(f"job {job_id} MAY STILL RUN AND COST MONEY: hf jobs cancel {job_id}")
        return list(ids)

    def _add_unknown(self, ids: dict[str, None]) -> bool:
        """Add jobs with the launch's label whose start was never answered."""
        try:
            ids |= {state.id: None for state in self._hub.running()}
        except HUB_FAULTS as error:
            self._say(f"the jobs of this launch cannot be listed: {error}")
            return False
        return True

    def _pause(self) -> None:
        self._woken.wait(self._poll_s)
        self._check_signal()

    def _check_signal(self) -> None:
        if self._signal:
            raise Stopped(self._signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        self._woken.set()

    def _say(self, text: str) -> None:
        self._streams.write("launch", text)
