"""Questions 3 to 5: generation during syncs, whole runs, the proxy."""

from __future__ import annotations

from benchmarks.report.data import Results, shown
from benchmarks.results import table


def swaps() -> str:
    """Generation during syncs: where its figures are."""
    gpu = (
        "On a GPU, p99 of the gaps between tokens is 2.3 to 2.7 medians while versions are swapped "
        "(2.2 to 2.4 without), and a swap every 2 s takes 0.4 to 0.6 % of the engine's time: "
        "[Hot-swap under load](#hot-swap-under-load)."
    )
    goal = (
        "**Goal: a dip of at most 2 %, no gap above three median steps.** Holds there; on a CPU, "
        "where engine, load generator and loading share two cores, the dip's interval reaches "
        "above it: [Throughput during a hot-swap, on a CPU]"
        "(plugin.md#throughput-during-a-hot-swap-on-a-cpu)."
    )
    return f"**{gpu}**\n\n{goal}"


def whole(results: Results) -> str:
    """Wall-clock of whole runs."""
    ours, stock = results["end_to_end_bucket"], results["end_to_end_stock"]
    peer, clock, step = stock.rows[0], "wall-clock, s", "step, median, s"
    longest = max(ours.rows, key=lambda row: row["bucket's round trip, ms"])
    here, there = (shown(row["time in syncs, %"]) for row in (longest, peer))
    answer = (
        f"{shown(ours.rows[0][clock])} s for {peer['steps']} steps with the bucket on loopback, "
        f"{shown(longest[clock])} s at {longest[_RTT]} ms, and {shown(peer[clock])} s with TRL's "
        f"own sync. Syncs took {here} % of the time at {longest[_RTT]} ms, {there} % with TRL's."
    )
    missed = [
        f"{row[_RTT]} ms: {shown(row[step])} s a step, {shown(peer[step])} s with TRL's"
        for row in ours.rows
        if row[step] > peer[step]
    ]
    goal = "no longer a step than TRL's sync without latency, whatever the bucket's latency"
    held = f"Missed at {'; '.join(missed)}." if missed else "Holds in all rows."
    rows = [*ours.rows, *stock.rows]
    return "\n\n".join(
        [
            f"**{answer}**",
            f"**Goal: {goal}.** {held}",
            table(list(rows[0]), rows),
            "TRL's sync has no bucket whose latency could be set: a delayed folder would be a "
            "stand-in of our own making, so it is compared without latency only. One run each, one "
            "after another: only large differences count, and rewards of single runs differ by "
            "chance. Where a version takes several steps to be ready, as at 100 ms, the trainer "
            "waits for rollouts that are young enough; a larger `max_staleness` takes older ones "
            "([Sizing](sizing.md#what-a-slow-bucket-does)). [Beside stock TRL](side-by-side.md) "
            "has 100 steps over a folder, and [A whole GRPO run](#a-whole-grpo-run) a GPU.",
            f"* {ours.source}\n* {stock.source}",
        ]
    )


def proxy() -> str:
    """Where the proxy's figures are."""
    return (
        "Requests a second, added time and CPU beside direct connections, nginx, vllm-router, "
        "sglang-router and the public recipe's kind of proxy, the cost of routing alone, affinity "
        "and imbalance are on a page of their own: [Proxy](proxy-performance.md)."
    )


_RTT = "bucket's round trip, ms"
