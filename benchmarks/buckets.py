"""The buckets that a benchmark compares: a folder, a real S3 server, and the same behind a link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slow_link import SlowLink
from demo.processes import Processes
from demo.s3_server import start_s3


@dataclass(frozen=True)
class Bucket:
    """Where it is, and what lies before it."""

    name: str
    url: str
    rtt_s: float = 0.0
    bytes_per_s: float | None = None


@contextmanager
def far(
    s3_url: str, *, rtt_s: float = 0.0, bytes_per_s: float | None = None
) -> Iterator[tuple[SlowLink, str]]:
    """Put a link before the S3 server of a bucket: the link, and the bucket's URL behind it."""
    endpoint = s3_url.partition("endpoint_url=")[2]
    port = int(endpoint.rpartition(":")[2])
    with SlowLink("127.0.0.1", port, rtt_s=rtt_s, bytes_per_s=bytes_per_s) as link:
        yield link, s3_url.replace(endpoint, f"http://127.0.0.1:{link.port}")


@contextmanager
def buckets(folder: Path, rtts_ms: list[int], bytes_per_s: float | None) -> Iterator[list[Bucket]]:
    """A folder, S3 on loopback, and S3 at each round-trip time with that bandwidth (``None``: any).

    Sets this process's AWS variables: the replicas it starts inherit them.
    """
    with (
        Processes(folder / "logs", lambda _name, _line: None) as processes,
        ExitStack() as stack,
    ):
        s3 = start_s3(processes, folder / "s3")
        stack.callback(s3.child.kill)  # it would take 5 s to end, and its data is thrown away
        os.environ.update(s3.env)
        found = [Bucket("folder", (folder / "bucket").as_uri()), Bucket("S3, loopback", s3.url)]
        for rtt_ms in rtts_ms:
            _, url = stack.enter_context(far(s3.url, rtt_s=rtt_ms / 1000, bytes_per_s=bytes_per_s))
            name = f"S3, {rtt_ms} ms" + (f", {bytes_per_s / 1e6:.0f} MB/s" if bytes_per_s else "")
            found.append(Bucket(name, url, rtt_ms / 1000, bytes_per_s))
        yield found
