"""What a checkpoint in the bucket costs the trainer: the hand-over, the upload, and memory.

``python -m benchmarks.checkpoint_costs [--s3] [--mib 64 1024]`` writes a checkpoint of one large
file and ten small ones per size, and hands it over as a trainer does: to a folder as a bucket, or
to a real S3 server on this machine. Each size runs in a process of its own, so that its peak memory
is its own. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from adapter_bucket.checkpoint import TrainerFacts
from adapter_bucket.checkpoint_fetch import fetch_newest
from adapter_bucket.checkpoint_upload import CheckpointUpload, CheckpointWriter
from adapter_bucket.publish import RunWriter
from adapter_bucket.stores import open_store
from demo.processes import Processes
from demo.s3_server import start_s3
from tests.adapters import BASE
from trl_async_bucket.staging import stage

MIB = 1024 * 1024
SMALL_FILES = 10


def write_checkpoint(folder: Path, mib: int) -> None:
    """Random bytes: nothing on the way can make them smaller."""
    folder.mkdir(parents=True)
    for number in range(SMALL_FILES):
        (folder / f"small_{number}.json").write_bytes(os.urandom(4000))
    with (folder / "optimizer.pt").open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(MIB))


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(url: str, folder: Path, mib: int) -> None:
    """Hand over, upload, fetch; print one row."""
    store = open_store(url)
    writer = RunWriter.claim(store, f"cost-{mib}", base_model=BASE, window=1, writer_id="bench")
    checkpoints = CheckpointWriter(store, writer.ownership, limit=1)
    before = peak_mib()
    started = time.perf_counter()
    staged = stage(folder / "checkpoint-1")
    handed_over = time.perf_counter()
    upload = CheckpointUpload(
        store, checkpoints.run_id, staged, step=1, epoch=1, trainer=TrainerFacts(world_size=1)
    )
    checkpoints.commit(upload.run())
    uploaded = time.perf_counter()
    grown = peak_mib() - before
    assert fetch_newest(store, checkpoints.run_id, folder / "fetched") is not None
    fetched = time.perf_counter()
    print(
        f"| {mib} | {1000 * (handed_over - started):.1f} | {mib / (uploaded - handed_over):.0f} | "
        f"{mib / (fetched - uploaded):.0f} | {grown:.0f} |",
        flush=True,
    )


def main() -> None:
    """Measure every size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", action="store_true", help="a real S3 server instead of a folder")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        url, folder, mib = options.measure
        measure(url, Path(folder), int(mib))
        return
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, env = (temporary / "bucket").as_uri(), dict(os.environ)
        if options.s3:
            processes = stack.enter_context(
                Processes(temporary / "logs", lambda _name, _line: None)
            )
            server = start_s3(processes, temporary / "s3")
            url, env = server.url, {**env, **server.env}
        print("| MiB | hand-over, ms | upload, MiB/s | fetch, MiB/s | memory grown, MiB |")
        print("|---|---|---|---|---|", flush=True)
        for mib in options.mib:
            folder = temporary / str(mib)
            write_checkpoint(folder / "checkpoint-1", mib)
            command = [sys.executable, "-m", "benchmarks.checkpoint_costs", "--measure", url]
            subprocess.run([*command, str(folder), str(mib)], check=True, env=env)


if __name__ == "__main__":
    main()
