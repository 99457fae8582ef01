"""One server under load, measured window by window."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import engine_log, probe
from benchmarks.gpu.contenders import WINDOW, Bucket, Contender, Mix, Push, check_answers
from benchmarks.gpu.report import percentile
from benchmarks.gpu.swap_summary import STEADY

WAYS = {"ours": "staged", "parts": "parts", "prepared": "prepared", "in-loop": "in-loop"}
"""Cases that publish to the bucket, and how the server then loads."""

DISTURBING = ("push", "pause")
"""After these, requests that stood still have to catch up before anything else is measured."""


@dataclass
class Setting:
    """Sizes that differ between a GPU and ``--tiny``."""

    shape: str
    dtype: str
    in_flight: int
    streams: int
    prompt: int
    tokens: int
    window_s: float
    settle_s: float
    flags: tuple[str, ...]


class Run:
    """One server of one rank, under load."""

    def __init__(
        self, server: Any, rank: int, setting: Setting, bucket: Bucket, push: Push
    ) -> None:
        """Start the load, with as many versions ready as a run keeps."""
        self._server = server
        self._rank = rank
        self._setting = setting
        self._bucket = bucket
        self._push = push
        self._contenders: Mapping[str, Contender] = {
            **dict.fromkeys(WAYS, bucket), "mix": Mix(bucket), "push": push, "pause": push,
        }  # fmt: skip
        for _ in range(WINDOW):
            bucket.swap()
        self._disturbed = False
        self._load = subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.gpu.load", f"--url={server.url}",
                f"--in-flight={setting.in_flight}", f"--streams={setting.streams}",
                f"--prompt={setting.prompt}", f"--tokens={setting.tokens}",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._began = time.monotonic()
        self._counted = server.generated_tokens()
        self._drive(STEADY, 2 * setting.settle_s)
        while server.generated_tokens() - self._counted < setting.in_flight * setting.tokens:
            self._drive(STEADY, setting.settle_s)  # kernels may still be compiled

    def window(self, case: str) -> dict[str, Any]:
        """Measure one window of a case: ``steady``, or ``<way>:<seconds between swaps>``."""
        (self._server.probe_dir / "way").write_text(WAYS.get(case.partition(":")[0], probe.WAYS[0]))
        self._drive(case, self._setting.settle_s * (2 if self._disturbed else 1))
        self._disturbed = case.startswith(DISTURBING)
        self._report()
        started = time.monotonic()
        swaps = self._drive(case, self._setting.window_s)
        span = (started, time.monotonic())
        client = self._report()
        time.sleep(2 * engine_log.FLUSH_S)
        folder = self._server.probe_dir
        steps = engine_log.within(engine_log.read_steps(folder / engine_log.STEPS, started), span)
        periods = engine_log.periods_ms(steps)
        loads, prepared = (
            [s["ms"] for s in engine_log.read_spans(folder / engine_log.SPANS, kind, span)]
            for kind in ("load", "prepare")
        )
        return {
            "rank": self._rank, "case": case, "at": started, "seconds": span[1] - span[0],
            "tokens/s": engine_log.rate(steps, [span]),
            "step_p50_ms": percentile(periods, 50), "step_p99_ms": percentile(periods, 99),
            "step_max_ms": max(periods, default=float("nan")),
            "swaps_ms": [(end - start) * 1e3 for start, end in swaps],
            "lost_ms": engine_log.lost_ms(steps, swaps, span),
            "loads_ms": loads, "prepared_ms": prepared, **client,
        }  # fmt: skip

    def stop(self) -> None:
        """End the load; check the log against vLLM's own count, and the weights that served.

        Raises:
            RuntimeError: they do not agree.
        """
        counted = self._server.generated_tokens() - self._counted
        span = (self._began, time.monotonic())
        time.sleep(2 * engine_log.FLUSH_S)
        steps = engine_log.read_steps(self._server.probe_dir / engine_log.STEPS, self._began)
        logged = sum(step.requests for step in engine_log.within(steps, span))
        assert self._load.stdin is not None
        self._load.stdin.close()
        self._load.wait(timeout=30)
        time.sleep(1)  # what is still in flight would change the rounding of the answers below
        print(f"tokens: {logged} by the step log, {counted:.0f} by vLLM's counter", flush=True)
        if abs(logged / counted - 1) > 0.02:
            raise RuntimeError("the step log misses tokens, or counts too many")
        (self._server.probe_dir / "way").write_text(probe.WAYS[0])
        prompt = [5 + number % 200 for number in range(self._setting.prompt)]
        check_answers(self._server.url, self._bucket, self._push, prompt)

    def _drive(self, case: str, seconds: float) -> list[tuple[float, float]]:
        """Swap every so often; when each swap began and ended."""
        way, _, every = case.partition(":")
        contender = self._contenders.get(way)
        every_s = float(every or 0)
        if contender is None:
            self._tell(f"model {self._bucket.ready[-1]}")
        self._push.pause = way == "pause"
        swaps: list[tuple[float, float]] = []
        until = time.monotonic() + seconds
        due = time.monotonic() + every_s / 2
        while (now := time.monotonic()) < until:
            if contender is None or due > now:
                time.sleep(min(until - now, max(0.001, due - now if contender else until - now)))
                continue
            due = max(due + every_s, now)
            self._tell(f"model {contender.swap()}")
            swaps.append((now, time.monotonic()))
        return swaps

    def _tell(self, line: str) -> None:
        assert self._load.stdin is not None
        self._load.stdin.write(line + "\n")
        self._load.stdin.flush()

    def _report(self) -> dict[str, Any]:
        assert self._load.stdout is not None
        self._tell("report")
        answer: dict[str, Any] = json.loads(self._load.stdout.readline())
        return answer
