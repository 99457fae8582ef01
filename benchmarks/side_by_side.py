"""Bucket sync beside stock TRL adapter sync: same task, seed, steps and machine, in one run.

``python -m benchmarks.side_by_side`` trains one way after the other, prints the figures, and writes
``docs/side-by-side.md`` with its plot. Each trainer has one vLLM server to itself, as stock TRL can
use only one.

The rewards count as equal if the means of the last ``TAIL`` steps differ by no more than twice the
standard deviation of the step rewards there (pooled): step rewards within one run scatter that much
by themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from demo.fleet import start_replica, start_stock_server, start_trainer, wait_healthy
from demo.observe import read_metrics
from demo.processes import Child, Processes
from demo.summary import series, steps_only
from demo.tiny_model import build

ROOT = Path(__file__).parents[1]
TAIL = 30
TRAINING_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Outcome:
    """Figures of one run."""

    reward_tail: float
    reward_tail_sd: float
    ratio_deviation: float
    """Mean of |ratio - 1| over the steps."""
    blocked_mean_s: float
    blocked_p50_s: float
    wall_clock_s: float
    """From the first step's log to the last one's."""


def outcome(rows: Sequence[Mapping[str, Any]]) -> Outcome:
    """Figures from what a trainer logged."""
    steps = steps_only(rows)
    rewards, blocked = series(steps, "reward"), series(steps, "perf/weight_sync_s")
    return Outcome(
        reward_tail=statistics.mean(rewards[-TAIL:]),
        reward_tail_sd=statistics.stdev(rewards[-TAIL:]),
        ratio_deviation=statistics.mean(abs(value - 1) for value in series(steps, "ratio")),
        blocked_mean_s=statistics.mean(blocked),
        blocked_p50_s=statistics.median(blocked),
        wall_clock_s=steps[-1]["time"] - steps[0]["time"],
    )


def allowed_difference(ours: Outcome, stock: Outcome) -> float:
    """Twice the pooled standard deviation of the step rewards at the end."""
    return 2 * math.sqrt((ours.reward_tail_sd**2 + stock.reward_tail_sd**2) / 2)


def same_reward(ours: Outcome, stock: Outcome) -> bool:
    """The test that the module's docstring states."""
    return abs(ours.reward_tail - stock.reward_tail) <= allowed_difference(ours, stock)


def run_both(out: Path, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Train both ways; what each logged."""
    model = build(out / "model")
    logged = {}
    for name in ("bucket", "stock"):
        with Processes(out / f"logs-{name}", lambda _name, _line: None) as processes:
            extra: list[str] = ["--steps", str(steps)]
            if name == "bucket":
                url = f"file://{out / 'bucket-store'}"
                server = start_replica(processes, "replica", model, url)
                extra += ["--bucket", url, "--run-id", f"side-by-side-{int(time.time())}"]
            else:
                server = start_stock_server(processes, model)
                extra.append("--stock")
            wait_healthy(processes, [server])
            trainer = start_trainer(processes, model, server.url, out / name, *extra)
            _wait(processes, trainer, server.child)
            logged[name] = read_metrics(out / name / "metrics.jsonl")
    return logged


def _wait(processes: Processes, trainer: Child, server: Child) -> None:
    processes.wait_until(
        f"{trainer.name} to end",
        lambda: trainer.process.poll() is not None,
        timeout_s=TRAINING_TIMEOUT_S,
        watch=[server],
    )
    if trainer.process.returncode != 0:
        raise RuntimeError(f"the trainer failed; its log is {trainer.log_path}")


PAGE = """\
# Beside stock TRL

`python -m benchmarks.side_by_side --steps {steps}`: the demo's task, one vLLM server each, the same
seed, one run each, one after the other ({machine}; {versions}).

| | bucket sync | TRL's adapter sync |
|---|---|---|
| reward, mean of the last {tail} steps (standard deviation) | {rewards} |
| mean of \\|`ratio` − 1\\| | {ratios} |
| optimizer blocked by a sync, mean | {means} |
| optimizer blocked by a sync, median | {medians} |
| wall-clock for {steps} steps | {clocks} |

Rewards are {verdict} by the test of the script: the means of the last {tail} steps differ by
{difference:.3f}; twice the pooled standard deviation of the step rewards there is {allowed:.3f}.

![Reward of both runs by optimizer step](images/side-by-side.svg)
"""


def page(ours: Outcome, stock: Outcome, steps: int) -> str:
    """The Markdown page."""
    both = (ours, stock)
    return PAGE.format(
        steps=steps,
        tail=TAIL,
        machine=f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        versions=", ".join(f"{name} {version(name)}" for name in ("trl", "vllm", "torch")),
        rewards=" | ".join(f"{one.reward_tail:.3f} ({one.reward_tail_sd:.3f})" for one in both),
        ratios=" | ".join(f"{one.ratio_deviation:.4f}" for one in both),
        means=" | ".join(f"{1000 * one.blocked_mean_s:.1f} ms" for one in both),
        medians=" | ".join(f"{1000 * one.blocked_p50_s:.1f} ms" for one in both),
        clocks=" | ".join(f"{one.wall_clock_s:.1f} s" for one in both),
        verdict="equal" if same_reward(ours, stock) else "NOT equal",
        difference=abs(ours.reward_tail - stock.reward_tail),
        allowed=allowed_difference(ours, stock),
    )


def draw(path: Path, logged: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Both reward curves."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "side-by-side"  # the same figure gives the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, label in (("bucket", "bucket sync"), ("stock", "TRL's adapter sync")):
        steps = steps_only(logged[name])
        axes.plot(series(steps, "step"), series(steps, "reward"), label=label)
    axes.set(xlabel="optimizer step", ylabel="mean reward of a step", ylim=(0, 1))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run both, print, and write the page; exit 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("demo-out/side-by-side"))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page goes")
    options = parser.parse_args()
    if options.steps < TAIL:
        parser.error(f"--steps must be at least {TAIL}: rewards are compared over the last {TAIL}")
    logged = run_both(options.out.resolve(), options.steps)
    ours, stock = outcome(logged["bucket"]), outcome(logged["stock"])
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "side-by-side.md").write_text(page(ours, stock, options.steps))
    draw(options.docs / "images" / "side-by-side.svg", logged)
    print(json.dumps({"bucket": asdict(ours), "stock": asdict(stock)}, indent=1))
    claims = {
        "rewards equal": same_reward(ours, stock),
        "ratio deviation no larger": ours.ratio_deviation <= stock.ratio_deviation,
        "wall-clock lower": ours.wall_clock_s < stock.wall_clock_s,
    }
    print("\n".join(f"{'holds' if holds else 'FAILS'}: {claim}" for claim, holds in claims.items()))
    raise SystemExit(0 if all(claims.values()) else 1)


if __name__ == "__main__":
    main()
