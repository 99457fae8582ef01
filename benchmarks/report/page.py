"""The part of ``docs/performance.md`` that is written, and where it stands."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import growth, runs, syncs
from benchmarks.report.data import Results

BEGIN = "<!-- written by make bench-report -->"
END = "<!-- end of what is written -->"


def written(results: Results) -> str:
    """Six questions, answered."""
    sections = {
        "How long does a sync keep the optimizer waiting?": syncs.blocked(results),
        "How long from publishing until replicas are ready?": syncs.ready(results),
        "What does generation lose during syncs?": runs.swaps(),
        "How long does a whole run take?": runs.whole(results),
        "What does the proxy cost?": runs.proxy(),
        "What grows?": growth.grown(results),
    }
    parts = [_machine(results)]
    for number, (title, text) in enumerate(sections.items(), 1):
        parts += [f"### {number}. {title}", text]
    return "\n\n".join(parts) + "\n"


def with_written(page: str, results: Results) -> str:
    """The page, its written part replaced.

    Raises:
        ValueError: the page has no such part.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{written(results)}\n{END}{tail}"


def write(page: Path, results: Results) -> None:
    """Replace the written part of the file."""
    page.write_text(with_written(page.read_text(), results))


def _machine(results: Results) -> str:
    """What all figures have in common."""
    found = {
        (about["processor"], about["cores"], about["python"], tuple(about["versions"].items()))
        for about in (result.environment for result in results)
    }
    said = [
        f"{cores} shared CPU cores of a cloud VM ({processor}), Python {python}, "
        + ", ".join(f"{name} {version}" for name, version in versions)
        for processor, cores, python, versions in sorted(found)
    ]
    return (
        f"{'; '.join(said)}. Servers, buckets and clients of a measurement share these cores. "
        "The load before a command is named with it: from 2 on, other programs ran beside it, or "
        "had just ended, and times are upper bounds. "
        "`make bench-results` takes all figures anew, `make bench-report` writes this section."
    )
