"""An object of the bucket that is damaged: a byte of it is flipped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.faults.matrix.faults import Scene

AHEAD_S = 2.0
"""So much later than the harness do the replicas see the version that is damaged in ``publish``:
both shall meet it, and none may have it already."""
APPEARS_S = 20.0


def corrupt(scene: Scene, release: Callable[[], None]) -> None:
    """Flip a byte of the newest weights; of the newest checkpoint in its phase, which is then used.

    In ``publish`` it is the version that is being uploaded, before any replica has it.
    """
    world = scene.world
    below = f"demo/runs/{scene.record.run_id}"
    if scene.phase == "publish":
        _corrupt_what_comes(scene, f"{below}/adapters/", release)
        return
    document = world.store.get_object(Bucket=world.bucket, Key=f"{below}/manifest.json")
    manifest = json.loads(document["Body"].read())
    if scene.phase == "checkpoint":
        newest = manifest["checkpoints"][-1]
        _flip(
            scene,
            f"{below}/checkpoints/checkpoint-{newest['step']}/e{newest['epoch']}/optimizer.pt",
        )
        scene.life.kill()
    else:
        _flip(scene, f"{below}/adapters/v{manifest['latest']:08d}/adapter_model.safetensors")
    release()


def _corrupt_what_comes(scene: Scene, prefix: str, release: Callable[[], None]) -> None:
    links = [link for name, link in scene.world.store_links.items() if name != "trainer"]
    known = _weights(scene, prefix)
    for link in links:
        link.latency_s = AHEAD_S
    try:
        release()
        deadline = time.monotonic() + APPEARS_S
        while not (new := _weights(scene, prefix) - known):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the upload did not end within {APPEARS_S:.0f} s")
            time.sleep(0.01)
        _flip(scene, min(new))
    finally:
        for link in links:
            link.latency_s = 0.0


def _weights(scene: Scene, prefix: str) -> set[str]:
    found = scene.world.store.list_objects_v2(Bucket=scene.world.bucket, Prefix=prefix)
    keys = {item["Key"] for item in found.get("Contents", [])}
    return {key for key in keys if key.endswith(".safetensors")}


def _flip(scene: Scene, key: str) -> None:
    store, bucket = scene.world.store, scene.world.bucket
    data = bytearray(store.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[-100] ^= 0xFF
    store.put_object(Bucket=bucket, Key=key, Body=bytes(data))
