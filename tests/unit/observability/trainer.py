"""A trainer without a model: the real publisher, writer and readiness, two versions.
``python -m tests.unit.observability.trainer BUCKET_URL RUN PROXY_URL``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from adapter_bucket.layout import adapter_name
from adapter_bucket.manifest import RunState
from adapter_bucket.publish import RunWriter
from adapter_bucket.ready_policy import ANY
from adapter_bucket.stores import open_store
from tests.adapters import BASE, version
from trl_async_bucket.publisher import Publisher
from trl_async_bucket.readiness import ReplicaClient
from trl_async_bucket.sync_record import Snapshot
from trl_async_bucket.sync_trace import observe_syncs

PATIENCE_S = 30.0


class Buffer:
    def data(self) -> bytes:
        weights: bytes = version(1)["weights"]
        return weights


def main(url: str, run_id: str, proxy: str) -> None:
    on_synced = observe_syncs(run_id)
    writer = RunWriter.claim(open_store(url), run_id, base_model=BASE, window=2, writer_id="test")
    client = ReplicaClient(proxy)

    def publish(snapshot: Snapshot) -> None:
        writer.publish(snapshot.version, **version(snapshot.version))

    def wait_ready(number: int, timeout_s: float, should_stop: Callable[[], bool]) -> bool:
        name = adapter_name(run_id, number)
        return client.wait_ready(name, policy=ANY, timeout_s=timeout_s, should_stop=should_stop)

    publisher = Publisher(
        publish=publish, wait_ready=wait_ready, on_ready=lambda number: None,
        buffers=(Buffer(), Buffer()), timeout_s=PATIENCE_S, on_synced=on_synced,
    )  # fmt: skip
    for number in (1, 2):
        buffer = publisher.reserve()
        publisher.submit(Snapshot(number, number, buffer, time.monotonic(), snapshot_s=0.002))
        publisher.wait_lag(0, PATIENCE_S)
    publisher.close(drain=True, timeout_s=PATIENCE_S)
    writer.close(RunState.FINISHED)


if __name__ == "__main__":
    main(*sys.argv[1:])
