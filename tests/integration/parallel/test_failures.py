"""The bucket fails under a run of two ranks: both end, soon, with an error that names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_bucket.fencing import read_manifest
from adapter_bucket.fetch import fetch_version
from adapter_bucket.manifest import Manifest, RunState
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from tests.integration.parallel.conftest import Runs
from tests.integration.parallel.failing import BREAKS_AFTER, RUN
from tests.s3_servers import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def manifest_of(store: Store) -> Manifest:
    found = read_manifest(store, RUN, SigningKeys())
    assert found is not None
    return found.manifest


def check_endings(runs: Runs, name: str, cause: str) -> None:
    own, other = (runs.report(name, rank) for rank in (0, 1))
    assert cause in own["error"]
    # At the same step's sync, in rank 0's own words.
    assert other["error"] == f"RankFailed: publishing the policy: rank 0 failed: {own['error']}"
    assert own["step"] == other["step"] >= BREAKS_AFTER


def test_a_bucket_that_takes_no_more_adapters(runs: Runs) -> None:
    """The manifest can still be written, so the run is marked interrupted."""
    check_endings(runs, "no-adapters", "adapters")
    bucket = runs.out / "no-adapters" / "bucket"
    assert manifest_of(open_store(bucket.as_uri())).state is RunState.INTERRUPTED


def test_an_s3_server_that_takes_nothing_any_more(
    runs: Runs, seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last version stays whole, and the run stays marked running: nobody could say more."""
    check_endings(runs, "only-503", "SlowDown")
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(runs.s3_url)
    manifest = manifest_of(store)
    assert manifest.state is RunState.RUNNING
    fetch_version(store, RUN, manifest.versions[-1], tmp_path)
