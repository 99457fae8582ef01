"""How many round trips one request to an S3 server takes, by our client and by boto3's own.

    python -m benchmarks.round_trips [--tiny] [--rtt-ms 50] [--rounds 10] [--out DIR]

A real S3 server behind a TCP link that delays and does not throttle, on connections that are open
already. The time of a request divided by the link's round-trip time is what it costs on any link,
plus what client and server compute. A view is what a trainer publishes: a part of its snapshot's
buffer, which boto3 takes as a file-like body only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from adapter_bucket.s3_settings import make_client, parse_s3_url
from adapter_bucket.s3_transfer import body_of, md5_of
from benchmarks import results
from benchmarks.adapters import Adapter
from benchmarks.buckets import buckets

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MANIFEST = b"{" + b" " * 4094 + b"}"
"""As large as one with a window of 4."""


def plain_client(url: str) -> S3Client:
    """What ``boto3.client("s3")`` gives, for the same bucket."""
    settings = parse_s3_url(url)
    config = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", endpoint_url=settings.endpoint_url, config=config)


def put(client: S3Client, bucket: str, key: str, data: bytes | memoryview) -> str:
    """One ``PutObject``, as ``S3Store`` sends it; returns the ETag."""
    digest = md5_of(data)
    answer = client.put_object(Bucket=bucket, Key=key, Body=body_of(data), ContentMD5=digest)
    return answer["ETag"]


def unchanged(client: S3Client, bucket: str, key: str, etag: str) -> None:
    """One poll that finds nothing new."""
    try:
        client.get_object(Bucket=bucket, Key=key, IfNoneMatch=etag)
    except client.exceptions.ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 304:
            raise
        return
    raise RuntimeError(f"{key} was sent again although its ETag had not changed")


def measure(client: S3Client, bucket: str, who: str, rtt_s: float, rounds: int) -> dict[str, Any]:
    """One row: round trips of each request."""
    weights = memoryview(Adapter("tiny" if rounds < 3 else "1.5B", 1).weights)
    small, large = f"{who}/manifest", f"{who}/weights"
    etag = put(client, bucket, small, MANIFEST)
    requests: dict[str, Callable[[], object]] = {
        "put a manifest": lambda: put(client, bucket, small, MANIFEST),
        "put weights (view)": lambda: put(client, bucket, large, weights),
        "poll, unchanged": lambda: unchanged(client, bucket, small, etag),
        "get a manifest": lambda: client.get_object(Bucket=bucket, Key=small)["Body"].read(),
        "get weights": lambda: client.get_object(Bucket=bucket, Key=large)["Body"].read(),
    }
    row: dict[str, Any] = {"client": who, "round trip, ms": round(1000 * rtt_s)}
    for name, request in requests.items():
        row[name] = round(_median_s(request, rounds) / rtt_s, 2)
    return {**row, "rounds": rounds}


def _median_s(request: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        request()
        times.append(time.perf_counter() - began)
    return results.median(times[1:])


def main() -> None:
    """Measure both clients."""
    parser = results.arguments("round_trips", __doc__)
    parser.add_argument("--rtt-ms", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if options.tiny:
        options.rtt_ms, options.rounds = 20, 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        far = stack.enter_context(buckets(folder, [options.rtt_ms], None))[-1]
        settings = parse_s3_url(far.url)
        clients = {"boto3 as it is": plain_client(far.url), "as shipped": make_client(settings)}
        rows = [
            measure(client, settings.bucket, who, far.rtt_s, options.rounds)
            for who, client in clients.items()
        ]
    results.write("round_trips", rows, options.out)


if __name__ == "__main__":
    main()
