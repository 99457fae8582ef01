"""`python -m demo`: a real GRPO run over a bucket on one machine, watched until it has learned."""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from demo.display import Display
from demo.fleet import Server, start_proxy, start_replica, start_trainer, wait_healthy
from demo.observe import ReadyLog, read_metrics, requests_by_replica
from demo.processes import Processes
from demo.report import print_summary, table_rows, write_html
from demo.s3_server import start_s3
from demo.summary import summarise
from demo.tiny_model import build

RUN_ID = "demo"
TRAINING_TIMEOUT_S = 600.0


def main() -> None:
    """Run the demo; exit 0 if the run finished and its report is written."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--s3", action="store_true", help="use a real S3 server, not a folder")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    # SIGTERM like Ctrl-C: both unwind through the context managers, which stop every process.
    # SIGINT too, because a shell leaves it ignored for what it starts in the background.
    signal.signal(signal.SIGINT, _raise_interrupt)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        run(options.out.resolve(), steps=options.steps, s3=options.s3)
    except KeyboardInterrupt:
        print("interrupted; every process was stopped", file=sys.stderr)
        raise SystemExit(130) from None
    except RuntimeError as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def run(out: Path, *, steps: int, s3: bool) -> None:
    """One run, from building the model to the report.

    Raises:
        RuntimeError: a process ended early or took too long; names its log.
    """
    for stale in ("bucket", "s3", "logs", "trainer"):
        shutil.rmtree(out / stale, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    with Display(steps) as display, Processes(out / "logs", display.line) as processes:
        display.note("demo", f"building the base model in {out / 'model'}")
        model = build(out / "model")
        bucket, env = f"file://{out / 'bucket'}", {}
        if s3:
            server = start_s3(processes, out / "s3")
            bucket, env = server.url, server.env
        display.note("demo", f"bucket {bucket.partition('?')[0]}; starting two vLLM replicas")
        replicas = {
            name: start_replica(processes, name, model, bucket, env=env)
            for name in ("replica-1", "replica-2")
        }
        proxy = start_proxy(processes, list(replicas.values()))
        wait_healthy(processes, [*replicas.values(), proxy])
        display.note("demo", f"replicas are healthy; proxy at {proxy.url}; starting the trainer")
        trainer = start_trainer(
            processes, model, proxy.url, out / "trainer",
            "--bucket", bucket, "--run-id", RUN_ID, "--steps", str(steps), env=env,
        )  # fmt: skip
        display.start_training()
        metrics_path = out / "trainer" / "metrics.jsonl"

        def finished() -> bool:
            if rows := read_metrics(metrics_path):
                display.step(rows[-1])
            return trainer.process.poll() is not None

        with ReadyLog(replicas, RUN_ID) as ready:
            watch = [server.child for server in (*replicas.values(), proxy)]
            processes.wait_until(
                "the training", finished, timeout_s=TRAINING_TIMEOUT_S, watch=watch
            )
            ready.look()
        if trainer.process.returncode != 0:
            raise RuntimeError(
                f"the trainer ended with code {trainer.process.returncode}; its log is "
                f"{trainer.log_path}"
            )
        sent = _by_name(requests_by_replica(proxy), replicas)
    metrics = read_metrics(metrics_path)
    rows = table_rows(summarise(metrics), ready.versions, sent)
    write_html(out / "report.html", metrics, rows)
    print_summary(display.console, rows)
    display.console.print(f"report: {out / 'report.html'}   logs: {out / 'logs'}")


def _by_name(by_url: dict[str, int], replicas: dict[str, Server]) -> dict[str, int]:
    return {name: by_url.get(server.url, 0) for name, server in replicas.items()}


def _raise_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
