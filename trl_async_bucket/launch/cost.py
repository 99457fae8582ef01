"""What a run costs an hour. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from adapter_bucket.errors import ConfigError
from trl_async_bucket.launch.job_plan import Job


def cost_line(jobs: Sequence[Job], prices: Mapping[str, float]) -> str:
    """The sum, and what it is made of.

    Args:
        jobs: All jobs of the run.
        prices: US dollars an hour by flavor; empty where they are not known.

    Raises:
        ConfigError: there are prices, and none for a job's flavor.
    """
    counts = Counter(job.flavor for job in jobs)
    if not prices:
        parts = " + ".join(f"{count} × {flavor}" for flavor, count in counts.items())
        return f"cost: {parts}; prices are unknown, as the Hub was not reached"
    for flavor in counts:
        if flavor not in prices:
            raise ConfigError(
                f"flavor {flavor!r} is none of the Hub's: use {', '.join(sorted(prices))}"
            )
    parts = " + ".join(
        f"{count} × {flavor} at ${prices[flavor]:.2f}" for flavor, count in counts.items()
    )
    total = sum(count * prices[flavor] for flavor, count in counts.items())
    return f"cost: ${total:.2f} an hour ({parts})"
