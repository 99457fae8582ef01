"""What the record of a run must show, whatever happened to it.

1. No completion was served by another version than it named: its log-probabilities are computed
   again, from the bytes that were put into the bucket under that name.
2. No rollout was trained twice, and none that was not generated.
3. No version went backwards: in the manifest, at the replicas, at the trainer, over restarts too.

What concerns resources is in ``resources``. Pure but for the computing, which is ``truth``'s.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapter_bucket.layout import parse_adapter_name
from tests.faults.matrix.recorder import Generation, Record
from tests.faults.matrix.truth import Truth

TOLERANCE = 1e-3
"""Nats. vLLM and transformers differ by some 1e-5 in float32; neighbouring versions by more than
this in most completions, see ``Checks.told_apart``."""

SAMPLE = 1500
"""Completions of a run that are computed again, at random above that."""


@dataclass
class Checks:
    """How much was checked, and what was wrong."""

    completions: int = 0
    recomputed: int = 0
    largest_difference: float = 0.0
    told_apart: float = 0.0
    """Share of those completions that the version before or after would not have passed as."""
    trained: int = 0
    versions: int = 0
    problems: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    """When it happened, where that is known."""

    def wrong(self, text: str, at: float | None = None) -> None:
        """Note a problem."""
        self.problems.append(text)
        if at is not None:
            self.times[text] = at


def check_record(record: Record, model: Path, *, seed: int = 0) -> Checks:
    """Check everything.

    Args:
        record: Of an ended run.
        model: Directory of the base model.
        seed: Of the sample.
    """
    checks = Checks(completions=len(record.generations), trained=len(record.trained))
    for text in record.broken:
        checks.wrong(text)
    check_forward(record, checks)
    check_trained_once(record, checks)
    check_completions(record, checks, Truth(model), random.Random(seed))
    return checks


def published(record: Record) -> dict[int, str]:
    """sha256 of each committed version's weights."""
    digests: dict[int, str] = {}
    for manifest in record.committed:
        digests.update(manifest.files)
    return digests


def check_forward(record: Record, checks: Checks) -> None:
    """Versions go forward only, and a number stands for one set of bytes."""
    digests: dict[int, str] = {}
    for earlier, later in itertools.pairwise(record.committed):
        if (later.epoch, later.latest) < (earlier.epoch, earlier.latest):
            checks.wrong(f"the manifest went back to version {later.latest}", later.at)
        if later.latest < earlier.latest:
            checks.wrong(f"latest went from {earlier.latest} to {later.latest}", later.at)
    for manifest in record.committed:
        for version, digest in manifest.files.items():
            if digests.setdefault(version, digest) != digest:
                checks.wrong(f"version {version} has two contents", manifest.at)
    checks.versions = len(digests)
    newest: dict[str, int] = defaultdict(int)
    for seen in record.seen:
        last = max(seen.ready, default=0)
        if last and last < newest[seen.replica]:
            checks.wrong(f"{seen.replica} went from {newest[seen.replica]} to {last}", seen.at)
        newest[seen.replica] = max(newest[seen.replica], last)
    _check_trainers(record, checks)


def _check_trainers(record: Record, checks: Checks) -> None:
    by_life: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in record.events:
        by_life[event["life"]].append(event)
    begun = [event for event in record.events if "began" in event]
    for earlier, later in itertools.pairwise(begun):
        if later["epoch"] <= earlier["epoch"]:
            checks.wrong(f"trainer {later['life']} has epoch {later['epoch']}", later["at"])
        known = max((m.latest for m in record.committed if m.epoch < later["epoch"]), default=0)
        if later["version"] <= known:
            text = f"trainer {later['life']} began with version {later['version']} after {known}"
            checks.wrong(text, later["at"])
    for life, events in by_life.items():
        for kind, key in (("step", "version"), ("ready", "ready")):
            numbers = [event[key] for event in events if kind in event]
            if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
                checks.wrong(f"trainer {life}: {kind} versions are not ascending: {numbers[-20:]}")


def check_trained_once(record: Record, checks: Checks) -> None:
    """Each rollout that was taken is one that was answered, and each is taken once.

    A rollout is known by the seed of its request. Two with the same tokens and log-probabilities
    are interchangeable, so what counts is how many there are of each kind.
    """
    seeds: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for generation in record.generations:
        logprobs = tuple(float(np.float32(value)) for value in generation.logprobs)
        seeds[generation.prompt, generation.tokens, logprobs].add(generation.seed)
    taken = Counter((one.prompt, one.tokens, one.logprobs) for one in record.trained)
    last = {(one.prompt, one.tokens, one.logprobs): one.at for one in record.trained}
    for rollout, times in taken.items():
        if times > len(seeds[rollout]):
            text = (
                f"a rollout was trained {times} times and generated {len(seeds[rollout])} times: "
                f"{rollout[1]}"
            )
            checks.wrong(text, last[rollout])
    if not record.trained:
        checks.wrong("no rollout was seen to be trained on")


def check_completions(record: Record, checks: Checks, truth: Truth, rng: random.Random) -> None:
    """Compute log-probabilities again, by the version that each completion named."""
    digests = published(record)
    chosen = list(record.generations)
    if len(chosen) > SAMPLE:
        chosen = rng.sample(chosen, SAMPLE)
    by_version: dict[int, list[Generation]] = defaultdict(list)
    for one in chosen:
        parsed = parse_adapter_name(one.model)
        if one.answered_model != one.model:
            checks.wrong(f"{one.model} was answered by {one.answered_model}", one.at)
        elif parsed is None or parsed[1] not in digests:
            checks.wrong(f"{one.model} was answered and never committed", one.at)
        else:
            by_version[parsed[1]].append(one)
    apart = 0
    for version, generations in by_version.items():
        weights = record.folder / digests[version]
        found = truth.differences(weights, generations)
        for one, difference in zip(generations, found, strict=True):
            checks.largest_difference = max(checks.largest_difference, difference)
            if not difference <= TOLERANCE:
                text = f"{one.model} on {one.replica} differs by {difference:.4f} nats"
                checks.wrong(text, one.at)
        neighbour = next((v for v in (version + 1, version - 1) if v in digests), None)
        if neighbour is not None and (record.folder / digests[neighbour]).exists():
            others = truth.differences(record.folder / digests[neighbour], generations)
            apart += sum(difference > TOLERANCE for difference in others)
        checks.recomputed += len(generations)
    checks.told_apart = round(apart / max(checks.recomputed, 1), 3)
    if checks.recomputed == 0:
        checks.wrong("no completion was seen")
