"""Two trainings share one fleet of replicas: the mathematics run and the tool agent.

    python -m examples.two_runs_one_fleet --bucket-url s3://my-bucket/rl --server http://proxy:8000

Both train an adapter of the same base model, so one replica holds versions of both and batches
their requests together. Each run has names of its own (``gsm8k-rank1-v12``, ``tool-agent-v7``), and
neither waits for the other. A replica needs the slots of both: ``--max-loras`` 7 + 9 = 16 here
(``max_staleness + 3`` each), and the larger rank.

With trainers on machines of their own nothing changes: start ``gsm8k_math.py`` on one and
``tool_agent.py`` on the other, with the same bucket. ``--tiny``: both on this CPU, offline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

RUNS = {"gsm8k-rank1": "examples.gsm8k_math", "tool-agent": "examples.tool_agent"}
POLL_S = 1.0


def main() -> int:
    """Start both trainers, show what the fleet has ready, and wait for their ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bucket-url", help="s3://bucket/prefix, hf://… or file:///dir")
    parser.add_argument("--server", default="http://localhost:8000", help="the proxy")
    parser.add_argument("--model", help="default: that of each example")
    parser.add_argument("--tiny", action="store_true", help="a CPU, offline, two layers")
    options = parser.parse_args()
    if not options.tiny:
        if not options.bucket_url:
            parser.error("--bucket-url is needed")
        return run_both(options.server, options.bucket_url, options.model)
    from examples.tiny import fleet

    with tempfile.TemporaryDirectory() as scratch, fleet(Path(scratch)) as (model, bucket, proxy):
        return run_both(proxy.url, bucket, str(model), "--tiny")


def run_both(server: str, bucket: str, model: str | None, *more: str) -> int:
    """Returns 0 if both runs ended well."""
    flags = ["--server", server, "--bucket-url", bucket, *more]
    if model:
        flags += ["--model", model]
    trainers = {
        run: subprocess.Popen([sys.executable, "-m", module, "--run-id", run, *flags])
        for run, module in RUNS.items()
    }
    seen = ""
    try:
        while any(trainer.poll() is None for trainer in trainers.values()):
            time.sleep(POLL_S)
            if (line := fleet_line(server)) != seen:
                seen = line
                print(line, flush=True)
    finally:
        _stop(trainers)
    for run, trainer in trainers.items():
        print(f"{run} ended with code {trainer.returncode}")
    return int(any(trainer.returncode for trainer in trainers.values()))


def fleet_line(server: str) -> str:
    """What the fleet has ready; or why that is not known now, which concerns no trainer."""
    try:
        return f"ready: {', '.join(ready_versions(server))}"
    except (OSError, HTTPException, ValueError) as error:
        return f"no status of {server}: {error}"


def ready_versions(server: str) -> list[str]:
    """Names of the versions that some replica has ready now.

    Raises:
        OSError, HTTPException, ValueError: no proxy answers there, or not with a status.
    """
    with urllib.request.urlopen(f"{server}/bucket_lora/status", timeout=10) as answer:
        status = json.load(answer)
    if not isinstance(status, dict) or "replicas" not in status:
        raise ValueError("the answer is no status of a proxy")
    replicas = status["replicas"].values()
    return sorted({name for replica in replicas if replica for name in replica["ready"]})


def _stop(trainers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    for trainer in trainers.values():
        if trainer.poll() is None:
            trainer.terminate()  # publishes and saves, and ends within bucket_grace_s
    for trainer in trainers.values():
        trainer.wait()


if __name__ == "__main__":
    sys.exit(main())
