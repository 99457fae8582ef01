"""Does memory grow with the versions that were published? Pure.

Memory of a process that serves or trains goes up in steps while allocators and caches fill, and a
process can only be judged beside itself: so growth is a slope over work done, robust against single
steps, and what it grows by doing the same work *without* new versions is not the versions' doing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

LIMIT_MIB = 10.0
"""Growth over a run that counts. Keeping each version of the demo's adapter (120 KB in float32)
would make 24 MB of 200 versions."""

MOST_POINTS = 200
"""Of a stretch, evenly chosen: the slope looks at all pairs."""


@dataclass(frozen=True)
class Stretch:
    """Memory of one process on the way, at least two points."""

    work: Sequence[float]
    """What it had done so far, ascending: requests answered, or versions published."""
    mib: Sequence[float]

    @property
    def done(self) -> float:
        """Work from the first to the last point."""
        return self.work[-1] - self.work[0]

    def slope(self) -> float:
        """MiB per unit of work: the median of the slopes between all pairs of points (Theil, Sen).

        One step in the first or last third does not move it; what comes with each unit of work
        does.
        """
        points = list(zip(self.work, self.mib, strict=True))
        points = points[:: -(-len(points) // MOST_POINTS)]
        slopes = [(y - x) / (b - a) for (a, x), (b, y) in combinations(points, 2) if b > a]
        return statistics.median(slopes) if slopes else 0.0


@dataclass(frozen=True)
class Verdict:
    """What became of a process's memory."""

    grown_mib: float
    """By the slope, over the stretch in which versions came."""
    anyway_mib: float
    """What as much work without versions makes it grow."""

    @property
    def by_versions_mib(self) -> float:
        """The difference: what the versions are to blame for."""
        return self.grown_mib - self.anyway_mib

    @property
    def flat(self) -> bool:
        """Whether the versions left nothing behind that counts."""
        return self.by_versions_mib <= LIMIT_MIB


def judge(versions: Stretch, *without: Stretch) -> Verdict:
    """Compare a stretch with versions with stretches of the same work without any.

    Args:
        versions: After a warm-up.
        without: The least of their slopes is what the process grows anyway, none if it shrinks;
            without any, that is nothing.
    """
    anyway = max(min((stretch.slope() for stretch in without), default=0.0), 0.0)
    return Verdict(versions.slope() * versions.done, anyway * versions.done)
