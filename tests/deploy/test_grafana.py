"""The dashboard in the types that Grafana generates from its own schema (for version 10.1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.commands import DEPLOY

NEWER = {"definition"}
"""Fields that came after these types: what a query variable asks for, as Grafana exports it."""


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """What of a document is not there, or is another value, once it was read and written again."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key in given.keys() - NEWER:
            yield from lost(given[key], kept.get(key, "nothing"), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{number}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"


def test_every_field_of_the_dashboard_is_one_that_grafana_knows() -> None:
    # The fields of each kind of panel, and of queries to Prometheus.
    register_default_plugins()
    given = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    read = Dashboard.from_json(given)
    assert list(lost(given, json.loads(json.dumps(read, cls=JSONEncoder)))) == []
