"""What is done on SIGTERM, on two ranks of a real gloo group, where a part of it fails."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adapter_bucket.errors import StoreUnavailable
from tests.unit.trl_async_bucket.rank_processes import as_ranks
from trl_async_bucket.preemptible_run import PreemptibleRun
from trl_async_bucket.preemption import Preempted, SigtermWatch


class Run(PreemptibleRun):
    """The stop alone, without the trainer behind it."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        self.args = SimpleNamespace(
            world_size=dist.get_world_size(), device="cpu", bucket_checkpoints=True,
            save_strategy="steps", bucket_grace_s=30.0,
        )  # fmt: skip
        self.accelerator = SimpleNamespace(reduce=self._reduce)
        self.state = SimpleNamespace(global_step=3)
        self.callback_handler = SimpleNamespace(on_save=lambda *_: None, callbacks=[])
        self.model = self.control = self._bucket = None
        self.saved = False
        self._failing = failing
        self._bucket_syncs = 2
        self._bucket_sigterm = SigtermWatch(
            30.0, on_last_call=lambda left: None, end=lambda code: None
        )

    def _reduce(self, flag: torch.Tensor, reduction: str) -> torch.Tensor:
        dist.all_reduce(flag)
        return flag

    def add_callback(self, callback: Any) -> None:
        """There is no training loop here that would call it."""

    def is_world_process_zero(self) -> bool:
        return bool(dist.get_rank() == 0)

    def _snapshot_last(self) -> None:
        if dist.get_rank() in self._failing:
            raise StoreUnavailable("the publisher has stopped")

    def _save_checkpoint(self, *_: Any) -> None:
        self.saved = True


def stop(failing: tuple[int, ...]) -> tuple[bool, bool, float]:
    """Whether it saved and came to the end, and after how long."""
    run = Run(failing)
    watch = run._bucket_sigterm
    assert watch is not None
    watch.notice()
    started = time.monotonic()
    run._stop_for_preemption()
    return run.saved, watch._settled.is_set(), time.monotonic() - started


def stop_twice() -> list[tuple[bool, bool, float]]:
    return [stop(()), stop((0,))]


def test_a_publisher_that_failed_on_rank_0_costs_no_checkpoint_and_parts_no_ranks() -> None:
    for results in as_ranks(2, stop_twice):
        for saved, settled, seconds in results:
            assert saved
            assert settled
            assert seconds < 10


def step_with_sigterm_to(noticed: int, ignored: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether this rank watches, and whether a step ends the run after SIGTERM to one of them."""
    rank = dist.get_rank()
    if rank in ignored:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = Run(())
    run.args.save_strategy = "no"
    run._bucket_sigterm = None
    run._run_begins()
    watches = run._bucket_sigterm is not None
    run._step_ended()
    if rank == noticed:
        signal.raise_signal(signal.SIGTERM)
    try:
        run._step_ended()
    except Preempted:
        return watches, True
    finally:
        run._release_sigterm()
    return watches, False


@pytest.mark.parametrize("ignored", [0, 1])
def test_a_rank_that_ignores_sigterm_stops_with_the_one_that_gets_it(ignored: int) -> None:
    results = as_ranks(2, step_with_sigterm_to, 1 - ignored, (ignored,))
    assert results == [(True, True)] * 2


def test_where_every_rank_ignores_sigterm_nothing_is_exchanged() -> None:
    assert as_ranks(2, step_with_sigterm_to, 0, (0, 1)) == [(False, False)] * 2
