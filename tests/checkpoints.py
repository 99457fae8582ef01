"""Small checkpoint directories for tests, and the shortest way to bring one into a bucket."""

from __future__ import annotations

import random
from pathlib import Path

from adapter_bucket.checkpoint import TrainerFacts
from adapter_bucket.checkpoint_upload import CheckpointUpload, CheckpointWriter
from adapter_bucket.fencing import read_manifest
from adapter_bucket.manifest import CheckpointEntry
from adapter_bucket.publish import RunWriter
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Store
from tests.adapters import BASE

FACTS = TrainerFacts(world_size=1, software={"transformers": "5"})
FILES = ("optimizer.pt", "trainer_state.json", "rng_state.pth", "shards/.metadata", "empty.txt")


def write_checkpoint(folder: Path, seed: int, *, big_bytes: int = 0) -> dict[str, bytes]:
    """Write a directory like a trainer's; returns its content by relative name."""
    random_bytes = random.Random(seed)
    content = {name: random_bytes.randbytes(200) for name in FILES}
    content["empty.txt"] = b""
    if big_bytes:
        content["model.safetensors"] = random_bytes.randbytes(big_bytes)
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return content


def read_folder(folder: Path) -> dict[str, bytes]:
    """Content by relative name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def claim(store: Store, run_id: str = "run-1", writer_id: str = "w") -> RunWriter:
    """The run's next owner."""
    return RunWriter.claim(
        store, run_id, base_model=BASE, window=1, writer_id=writer_id, takeover=True
    )


def entries(store: Store, run_id: str = "run-1") -> list[CheckpointEntry]:
    """What the run's manifest names, oldest first."""
    found = read_manifest(store, run_id, SigningKeys())
    return found.manifest.checkpoints if found else []


def put_checkpoint(
    store: Store, writer: RunWriter, folder: Path, step: int, *, limit: int = 2
) -> CheckpointEntry:
    """Upload and commit a directory."""
    checkpoints = CheckpointWriter(store, writer.ownership, limit=limit)
    entry = CheckpointUpload(
        store, checkpoints.run_id, folder, step=step, epoch=checkpoints.epoch, trainer=FACTS
    ).run()
    checkpoints.commit(entry)
    return entry
