"""Questions 1 and 2: what a sync costs the optimizer, and when replicas have a version."""

from __future__ import annotations

import json

from benchmarks.optimizer_blocked import GOAL_MS, GOAL_SHARE
from benchmarks.publish_to_ready import BYTES_PER_S, POLLS_S, REQUESTS
from benchmarks.report.data import Goal, Result, Results, Row, shown, span
from benchmarks.results import ROOT, table

OURS = ("folder, ms", "S3, loopback, ms")
SHARE = "share of it"
LARGE_MB = 30
GPU_SNAPSHOT = ROOT / "benchmarks" / "gpu" / "results" / "snapshot.json"


def blocked(results: Results) -> str:
    """How long the optimizer waits."""
    one, two = results["optimizer_blocked"], results["optimizer_blocked_sharded"]
    rows = [*one.rows, *two.rows]
    faster = [1 / row[SHARE] for row in rows]
    answer = (
        f"{span(_worse(one), ' ms')} in one process, and {span(_worse(two), ' ms')} with the "
        f"factors cut over two; TRL's own save takes {shown(min(faster))} to {shown(max(faster))} "
        "times as long, before any replica has loaded it."
    )
    share = Goal(
        f"at most 1/{GOAL_SHARE} of TRL's way",
        [f"{_size(r)} 1/{1 / r[SHARE]:.0f}" for r in rows if r[SHARE] > 1 / GOAL_SHARE],
        len(rows),
        f"In one process a plain copy of {LARGE_MB} MB or more alone takes {_copies(one)} of it: "
        "on a CPU little else is left to save. With two, gloo's loopback sockets are most of it. "
        "TRL's load into the replicas, for which it waits as well, is not in its figure here; with "
        "it, a whole run shows 0.5 ms beside 95 ms ([Beside stock TRL](side-by-side.md)). "
        f"{_on_a_gpu()}",
    )
    floor = Goal(
        f"at most {GOAL_MS:.0f} ms more than copying the values",
        [
            f"{_size(r)} by {shown(r['over the copy, ms'] - GOAL_MS)} ms"
            for r in rows
            if r["over the copy, ms"] > GOAL_MS
        ],
        len(rows),
        "All of these have their factors cut over two processes: half of the values also pass "
        "through gloo's loopback sockets, on two cores that both processes keep busy.",
    )
    return "\n\n".join(
        [
            f"**{answer}**",
            f"{share}\n\n{floor}",
            table(list(rows[0]), rows),
            "![Blocked time by size of the adapter](images/bench-blocked.svg)",
            _sources(one, two),
        ]
    )


def _worse(result: Result) -> list[float]:
    return [max(row[name] for name in OURS) for row in result.rows]


def _copies(result: Result) -> str:
    """What the copy is of TRL's save, for large files."""
    rows = [row for row in result.rows if row["file, MB"] >= LARGE_MB] or result.rows
    parts = sorted(row["TRL's save, ms"] / row["copy, ms"] for row in rows)
    return f"1/{parts[0]:.0f} to 1/{parts[-1]:.0f}"


def _on_a_gpu() -> str:
    """How far the same goal holds there."""
    rows = json.loads(GPU_SNAPSHOT.read_text())["rows"]
    factors = [row["to host + save, ms"] / row["ours, ms"] for row in rows]
    held = sum(factor >= GOAL_SHARE for factor in factors)
    return (
        f"On a GPU it holds in {held} of {len(rows)} rows, with 1/{min(factors):.0f} to "
        f"1/{max(factors):.0f} ([What a snapshot costs](#what-a-snapshot-costs-the-optimizer))."
    )


def _size(row: Row) -> str:
    cut = f" on {row['processes']} processes" if row["processes"] > 1 else ""
    return f"{row['shape']} rank {row['rank']}{cut}"


def ready(results: Results) -> str:
    """How long until replicas have a version."""
    hint, polled = results["publish_to_ready"], results["polling_to_ready"]
    trips = results["round_trips"]
    rows = hint.rows
    local = [r["publish → ready, ms"] for r in rows if not r["floor, ms"]]
    far = [r for r in rows if r["floor, ms"]]
    over = [r["publish → ready, ms"] - r["floor, ms"] for r in far]
    answer = (
        f"While a trainer waits for it {span(local, ' ms')} on one machine; over a line, what its "
        f"round trips and bytes take plus {span(over, ' ms')}."
    )
    goal = Goal(
        "at most three round trips, the bytes at the line's speed (up and down) and 100 ms",
        [
            f"{r['bucket']}, {r['MB']} MB by {shown(r['publish → ready, ms'] - r['goal, ms'])} ms"
            for r in rows
            if r["publish → ready, ms"] > r["goal, ms"]
        ],
        len(rows),
        f"A line's floor is {REQUESTS} requests, one after another: put the weights, put the "
        "manifest that commits them, get the manifest, get the weights "
        "([0001](decisions/0001-objects-first-manifest-last.md)). The fourth one has to fit into "
        "the 100 ms, and at a round trip of 100 ms it is all of them. On one machine 37 MB are "
        "hashed on both sides and every value is looked at on both sides; the S3 server does its "
        "own work on the same two cores.",
    )
    polls = ", ".join(f"{poll_s:g}" for poll_s in POLLS_S)
    return "\n\n".join(
        [
            f"**{answer}**",
            str(goal),
            f"Median ms of each phase. *Floor*: {REQUESTS} round trips, and the bytes twice at "
            f"{BYTES_PER_S / 1e6:.0f} MB/s. On loopback there is no floor but this machine. One "
            "run is followed: with several, a version may wait for another one's download.",
            table(list(rows[0]), rows),
            "![Phases from publish to ready](images/bench-ready.svg)",
            f"While nobody waits, three replicas that look every {polls} s, versions at random "
            "times:",
            table(list(polled.rows[0]), polled.rows),
            "Round trips that one request takes on an open connection, with what the server and "
            "this machine compute:",
            table(list(trips.rows[0]), trips.rows),
            _sources(hint, polled, trips),
        ]
    )


def _sources(*results: Result) -> str:
    return "\n".join(f"* {result.source}" for result in results)
