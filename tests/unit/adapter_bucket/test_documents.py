"""The documents about the contract say what the code does."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from adapter_bucket.checkpoint import CheckpointIndex, TrainerFacts
from adapter_bucket.heartbeat import Heartbeat
from adapter_bucket.manifest import (
    CheckpointEntry,
    FileEntry,
    Manifest,
    Signature,
    VersionEntry,
    Writer,
    encode,
)
from adapter_bucket.memory_store import MemoryStore
from adapter_bucket.probe import Probe
from adapter_bucket.publish import RunWriter
from adapter_bucket.schemas import main, schema_files
from adapter_bucket.status import RunStatus
from tests.adapters import BASE, version
from tests.contract.test_invariants import History, check_no_garbage, reader

DOCS = Path(__file__).parents[3] / "docs"


def test_the_schemas_are_those_of_the_code(tmp_path: Path) -> None:
    main(tmp_path)
    for name, content in schema_files().items():
        assert (DOCS / "schemas" / name).read_text() == content
        assert (tmp_path / name).read_text() == content


def test_a_real_manifest_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="comes with vLLM, not with the dev extra")
    store = MemoryStore()
    writer = RunWriter.claim(store, "r", base_model=BASE, window=2, writer_id="w")
    writer.publish(1, **version(1))
    schema = json.loads(schema_files()["manifest.schema.json"])
    jsonschema.validate(json.loads(encode(writer.manifest)), schema)


def test_the_protocol_names_every_field() -> None:
    text = (DOCS / "protocol.md").read_text()
    for model in (
        Manifest,
        Writer,
        VersionEntry,
        Probe,
        FileEntry,
        Signature,
        CheckpointEntry,
        CheckpointIndex,
        TrainerFacts,
        Heartbeat,
        RunStatus,
    ):
        for field in model.model_fields:
            assert f"`{field}`" in text, f"{model.__name__}.{field} is not described"


def test_the_protocol_names_every_invariant_that_is_checked() -> None:
    text = (DOCS / "protocol.md").read_text()
    checks = [value for name, value in vars(History).items() if name.startswith("check_")]
    for check in (*checks, check_no_garbage, reader):
        name = (check.__doc__ or "").partition(":")[0]
        assert re.search(rf"^\| \*\*{name}\*\* ", text, re.MULTILINE), f"{name} is not described"


def test_the_cost_table_is_that_of_the_benchmark() -> None:
    spec = importlib.util.spec_from_file_location(
        "bucket_costs", DOCS.parent / "benchmarks" / "bucket_costs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (DOCS / "sizing.md").read_text()
    publish, fetch, manifest_bytes = module.count()
    assert (publish["create"] + publish["replace"], sum(fetch.values())) == (3, 2)
    assert f"({manifest_bytes:,} bytes with a window of 4)" in (DOCS / "protocol.md").read_text()
