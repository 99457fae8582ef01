"""What others can see of a trainer's syncs: its log lines as JSON, and traces. Both on request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from adapter_bucket.json_logs import set_up_logs
from adapter_bucket.layout import adapter_name
from adapter_bucket.traces import Traces, open_traces
from trl_async_bucket.sync_record import SyncTimes


def observe_syncs(run_id: str) -> Callable[[SyncTimes], None]:
    """Set up logs and traces as the environment asks; returns what to tell each finished sync.

    Raises:
        ConfigError: it asks for something that there is not, or that is not installed.
    """
    set_up_logs("trainer", run=run_id)
    return partial(trace_sync, open_traces("trainer", run_id), run_id)


def trace_sync(traces: Traces, run_id: str, times: SyncTimes) -> None:
    """Record the whole of a sync, and the parts that happened here; replicas record theirs."""
    snapshot, name = times.snapshot, adapter_name(run_id, times.snapshot.version)
    began_at = snapshot.taken_at - snapshot.snapshot_s
    traces.record("sync", name, began_at, times.ready_at, root=True)
    traces.record("snapshot", name, began_at, snapshot.taken_at)
    traces.record("publish", name, times.upload_began_at, times.committed_at)
    traces.record("ready", name, times.committed_at, times.ready_at)
