"""JSON Schemas of the documents in the bucket, made from the models that read them.

``python -m adapter_bucket.schemas docs/schemas`` writes them again; a test compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from adapter_bucket.checkpoint import CheckpointIndex
from adapter_bucket.heartbeat import Heartbeat
from adapter_bucket.manifest import Manifest

_DOCUMENTS: dict[str, type[BaseModel]] = {
    "manifest.schema.json": Manifest,
    "heartbeat.schema.json": Heartbeat,
    "checkpoint.schema.json": CheckpointIndex,
}


def schema_files() -> dict[str, str]:
    """File name to content."""
    files = {}
    for name, model in _DOCUMENTS.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        schema |= model.model_json_schema()
        files[name] = json.dumps(schema, indent=2) + "\n"
    return files


def main(folder: Path) -> None:
    """Write all schemas into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in schema_files().items():
        (folder / name).write_text(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
