"""Question 6: what grows with replicas, versions, prompts and tensors."""

from __future__ import annotations

from benchmarks.report.data import Results, shown, span
from benchmarks.results import table


def grown(results: Results) -> str:
    """All four tables."""
    watchers, manifest = results["growth_watchers"], results["growth_manifest"]
    prefixes, tensors = results["growth_prefixes"], results["growth_tensors"]
    reads = [row["weight reads a version"] for row in watchers.rows]
    kept = [row["manifest, KB"] / row["entries"] for row in manifest.rows]
    unchanged = [row["poll, unchanged, ms"] for row in manifest.rows]
    memory = prefixes.rows[-1]["memory grown, MB"]
    first, last = tensors.rows[0], tensors.rows[-1]
    most = max(watchers.rows, key=lambda row: row["watchers"])
    lines = [
        f"**Every replica reads each version's weights once (measured: {span(reads)}), and needs "
        "nothing of the others: what grows here is the load on the one machine that they share.**",
        "No goal was set; what would be a fault is a number that grows faster than its cause.",
        "**Replicas** (real watchers, no engine), from the commit to ready:",
        table(list(watchers.rows[0]), watchers.rows),
        "![Commit to ready by number of replicas](images/bench-watchers.svg)",
        f"All {most['watchers']} share two cores with the writer and the bucket, and are asked by "
        "a client all the time, so that they look more often than they would alone; on machines "
        "of their own, replicas do not wait for each other.",
        f"**Versions in the window**: {span(kept, ' KB')} a version, and {span(unchanged, ' ms')} "
        "of our own work for a poll that finds nothing new, whatever the window:",
        table(list(manifest.rows[0]), manifest.rows),
        "**Distinct prompts at the proxy**: the table of prefixes is bounded, "
        f"{shown(memory)} MB at most:",
        table(list(prefixes.rows[0]), prefixes.rows),
        f"**Tensors of an adapter**: {last['tensors']} instead of {first['tensors']} for the same "
        f"bytes take {shown(last['snapshot, ms'])} instead of {shown(first['snapshot, ms'])} ms:",
        table(list(tensors.rows[0]), tensors.rows),
        "\n".join(f"* {each.source}" for each in (watchers, manifest, prefixes, tensors)),
    ]
    return "\n\n".join(lines)
