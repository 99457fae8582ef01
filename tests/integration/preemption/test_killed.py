"""The trainer is killed at every step of its work, beside a replica that serves what it publishes.

It goes on each time on another machine. One chain of lives, seen by all tests here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapter_bucket.checkpoint_fetch import read_index
from adapter_bucket.fetch import fetch_version
from adapter_bucket.layout import (
    adapters_prefix,
    checkpoints_prefix,
    parse_checkpoint_key,
    parse_version_key,
)
from adapter_bucket.lifecycle import collect
from adapter_bucket.manifest import RunState
from demo.fleet import start_replica, wait_healthy
from demo.processes import Processes
from demo.tiny_model import build
from tests.integration.preemption.conftest import RUN, Bench, Trainer
from tests.integration.preemption.watching import BucketWatch, ReplicaWatch, Truth, Watching

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MANIFEST = "replace runs/run/manifest"
CHECKPOINT = "runs/run/checkpoints/checkpoint-[0-9]+/e[0-9]+"
UPLOADED = ["4:after create .*adapter_model", "4:before the commit of a version"]
"""Killed there, weights lie in the bucket under a number that nobody may ever serve."""
KILLS = [
    "9:snapshot",
    "4:before create .*adapter_config",
    "4:within .*adapter_model",
    *UPLOADED,
    "4:after the commit of a version",
    f"4:before {MANIFEST}",
    f"1:before upload {CHECKPOINT}/",
    f"1:within .*{CHECKPOINT}/",
    f"1:after upload {CHECKPOINT}/optimizer.pt",
    f"1:before create {CHECKPOINT}.json",
    f"1:after create {CHECKPOINT}.json",
    # The commit of a checkpoint is a write of the manifest like any other.
    f"7:after {MANIFEST}",
    f"1:after delete {CHECKPOINT}.json",
    f"1:before delete {CHECKPOINT}/",
    f"1:after delete {CHECKPOINT}/",
]
STEPS = 120
"""More than all lives before the last ever take: a busy machine trains on while a kill waits."""
TOLERANCE = 1e-3
"""Nats. vLLM and transformers differ by some 1e-5 in float32."""


@dataclass(frozen=True)
class Orphan:
    """A version that lies in the bucket and was never committed, as the replica sees it."""

    life: int
    version: int
    state: str
    status_code: int


@dataclass
class Chain:
    """All lives, and what was seen of them."""

    bench: Bench
    trainer: Trainer
    bucket: BucketWatch
    replica: ReplicaWatch
    model: Path
    orphans: list[Orphan]
    settled: dict[int, list[int]]
    """By life: the versions that were asked after its death, while nothing moved."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """Every life, from the first to the one that comes through."""
    folder = tmp_path_factory.mktemp("killed")
    model = build(folder / "model", warm_up_steps=2)  # nothing has to be learnt
    bench = Bench(folder)
    kills = [word for point in KILLS for word in ("--kill-at", point)]
    with Processes(folder / "logs", lambda _name, _line: None) as processes:
        try:
            server = start_replica(processes, "replica", model, bench.store.url)
            trainer = bench.start(
                "machines", "--step-s", "0.02", "--steps", str(STEPS), "--model", str(model),
                "--server", server.url, "--step-by-step", "--alone", (folder / "alone").as_uri(),
                *kills,
            )  # fmt: skip
            wait_healthy(processes, [server])
            bucket = BucketWatch(bench.store, RUN, folder / "watched")
            replica = ReplicaWatch(server, RUN)
            made = Chain(bench, trainer, bucket, replica, model, [], {})
            with Watching((bucket.look, 0.02), (replica.look, 0.04), (replica.ask_newest, 0.2)):
                for life in range(len(KILLS) + 1):
                    trainer.go_on()
                    trainer.until("life", life)
                    look_at_rest(made, life)
            assert trainer.end()[0] == 0, trainer.tail()
            yield made
        finally:
            bench.close()


def look_at_rest(chain: Chain, life: int) -> None:
    """While no trainer lives: ask for what is published, and for what lies there unpublished."""
    manifest = chain.bench.manifest()
    ended = manifest.state is RunState.FINISHED  # then its last version is what stays
    for entry in manifest.window_versions()[-1 if ended else 0 :]:
        found = fetch_version(chain.bench.store, RUN, entry, chain.bucket.folder / "versions")
        chain.bucket.weights[entry.version] = found
        assert chain.replica.state(entry.version, wait_s=20) == "ready", (life, entry.version)
        assert chain.replica.ask(entry.version) == 200, (life, entry.version)
        chain.settled.setdefault(life, []).append(entry.version)
    keys = [parse_version_key(key) for key in chain.bench.store.list(adapters_prefix(RUN))]
    for version in sorted({key[1] for key in keys if key and key[1] > manifest.latest}):
        state = chain.replica.state(version, wait_s=0.2)
        chain.orphans.append(Orphan(life, version, state, chain.replica.ask(version)))


def test_it_goes_on_each_time_as_if_nothing_had_happened(chain: Chain) -> None:
    died = [event["died"] for event in chain.trainer.of("died")]
    assert len(died) == len(KILLS), died
    lives = chain.trainer.of("began")
    assert len(lives) == len(KILLS) + 1
    # Every life is the owner, and its numbers are above all that came before.
    assert [one["epoch"] for one in lives] == list(range(1, len(KILLS) + 2))
    begun = [one["began"] for one in lives]
    assert begun == sorted(begun)
    assert begun[-1] >= 8
    assert len(chain.bucket.checkpoints) >= 3
    # Bit for bit what the undisturbed run comes to: nothing was lost, nothing trained twice.
    (through,), (alone,) = chain.trainer.of("finished"), chain.trainer.of("undisturbed")
    assert through["finished"] == alone["undisturbed"]


def test_no_version_number_stands_for_two_sets_of_bytes(chain: Chain) -> None:
    """Neither by what the trainers say they committed, nor by what a reader found."""
    digests = {version: set(found) for version, found in chain.bucket.digests.items()}
    for event in chain.trainer.of("committed"):
        for version, digest in event["committed"].items():
            digests.setdefault(int(version), set()).add(digest)
    assert all(len(found) == 1 for found in digests.values()), digests
    latest = [event["latest"] for event in chain.trainer.of("committed")]
    assert latest == sorted(latest)
    check_numbers(chain.trainer.events)


def test_the_replica_never_had_ready_what_was_not_published(chain: Chain) -> None:
    began: dict[int, float] = {}
    for event in chain.trainer.of("committing"):
        for version in event["committing"]:
            began.setdefault(int(version), event["at"])
    committed = {
        int(version) for one in chain.trainer.of("committed") for version in one["committed"]
    }
    committed |= chain.bucket.digests.keys()  # of a trainer that could not say so any more
    assert len(chain.replica.ready) >= 2 * len(KILLS)
    for seen in chain.replica.ready:
        for version in seen.versions:
            assert version in committed, f"version {version} was ready and never committed"
            assert seen.at > began[version], f"version {version} was ready before its commit"
    newest = [seen.versions[-1] for seen in chain.replica.ready]
    assert newest == sorted(newest)
    # And those that were uploaded but not committed it did not know.
    assert {orphan.life for orphan in chain.orphans} >= set(map(KILLS.index, UPLOADED))
    for orphan in chain.orphans:
        assert (orphan.state, orphan.status_code) == ("pending", 404), orphan


def test_completions_by_name_are_those_of_the_published_weights(chain: Chain) -> None:
    """Whatever was asked while trainers lived, and all that was ready after each death."""
    assert all(chain.settled[life] for life in range(len(KILLS) + 1))
    truth = Truth(chain.model)
    compared = [one for one in chain.replica.completions if one.version in chain.bucket.weights]
    assert {one.version for one in compared} >= set(itertools.chain(*chain.settled.values()))
    for completion in compared:
        difference = truth.difference(chain.bucket.weights[completion.version], completion)
        assert difference <= TOLERANCE, (completion.version, difference)
    told_apart = [
        truth.difference(chain.bucket.weights[earlier.version], later) > TOLERANCE
        for earlier, later in itertools.pairwise(compared)
        if chain.bucket.digests[earlier.version] != chain.bucket.digests[later.version]
    ]
    # Or the above would pass for any weights. Late ones differ little: the learning rate falls.
    assert sum(told_apart) >= 0.5 * len(told_apart)


def test_the_finished_run_is_whole_and_clean(chain: Chain) -> None:
    store, manifest = chain.bench.store, chain.bench.manifest()
    assert manifest.state is RunState.FINISHED
    assert len(manifest.checkpoints) == 2
    # The one before the last may have lost to a newer one.
    assert manifest.checkpoints[-1].step == STEPS
    for entry in manifest.checkpoints:
        assert read_index(store, RUN, entry).trainer.world_size == 1
    collect(store, RUN, older_than_s=-5)
    left = {parse_checkpoint_key(key) for key in store.list(checkpoints_prefix(RUN))}
    assert left == {(RUN, entry.step, entry.epoch) for entry in manifest.checkpoints}


def check_numbers(events: list[dict[str, Any]]) -> None:
    """Within a life versions go up by one a step.

    A number that a dead trainer took but never wrote may come again: nobody else ever knew it.
    """
    current: list[int] = []
    for event in events:
        if "began" in event:
            current = []
        if "version" in event:
            assert not current or event["version"] == current[-1] + 1
            current.append(event["version"])
