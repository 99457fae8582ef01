"""The Grafana dashboard asks only for what proxy and plugin export, and for all of the proxy's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bucket_lora_proxy.fleet import Fleet
from bucket_lora_proxy.metrics import Metrics
from bucket_lora_proxy.replicas import Model, Replica, Source
from bucket_lora_proxy.tallies import Tally
from bucket_lora_proxy.upstream import Origin, Pool
from vllm_bucket_lora import metrics as plugin_metrics

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())

_NAME = re.compile(r"\b(?:bucket_lora|process)_[a-z_]+")
_GIVEN_BY_PROMETHEUS = {"job", "instance", "le"}


def labels_by_name(page: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def touched(owner: object) -> None:
    """Give every labelled metric a sample, as it only then shows."""
    for metric in vars(owner).values():
        if isinstance(metric, Tally) and not metric.values:
            metric.add("x")
        if not isinstance(metric, Counter | Gauge | Histogram) or metric._labelvalues:
            continue
        if metric._labelnames:
            metric.labels(*metric._labelnames)


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    def pool() -> Pool:
        return Pool(Origin.parse("http://a"), limit=1, keep_alive_s=1, connect_timeout_s=1)

    replica = Replica(
        Origin.parse("http://a"), slot=0, data=pool(), control=pool(), source=Source.BUCKET
    )
    replica.begin("run-v1")
    replica.mark_up(None, [Model("run-v1", "base")])
    proxy = Metrics(Fleet([replica]))
    touched(proxy)
    touched(plugin_metrics)
    return labels_by_name(proxy.page().decode()) | {
        name: labels
        for name, labels in labels_by_name(generate_latest(REGISTRY).decode()).items()
        if name.startswith("bucket_lora_")
    }


def expressions() -> Iterator[str]:
    def panels(within: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for panel in within:
            yield panel
            yield from panels(panel.get("panels", []))

    for panel in panels(DASHBOARD["panels"]):
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def test_every_metric_and_label_it_names_exists(exported: dict[str, set[str]]) -> None:
    count = 0
    for expression in expressions():
        names = set(_NAME.findall(expression))
        assert names, expression
        assert names <= exported.keys(), (expression, names - exported.keys())
        labels = {label for name in names for label in exported[name]} | _GIVEN_BY_PROMETHEUS
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= labels, expression
        for matchers in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*[!=]", matchers)) <= labels, expression
        count += 1
    assert count >= 40


def test_every_metric_of_the_proxy_is_shown(exported: dict[str, set[str]]) -> None:
    shown = set(_NAME.findall("\n".join(expressions())))
    ours = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for name in exported
        if name.startswith("bucket_lora_proxy_") and not name.endswith("_created")
    }
    assert {name for name in ours if not {name, f"{name}_bucket"} & shown} == set()


def test_every_metric_of_the_proxy_is_documented(exported: dict[str, set[str]]) -> None:
    text = (ROOT / "docs/proxy.md").read_text()
    for name in exported:
        plain = re.sub(r"_(bucket|count|sum|created|total)$", "", name)
        if plain.startswith("bucket_lora_proxy_"):
            assert f"`{plain.removeprefix('bucket_lora_proxy_')}" in text, name


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert at["x"] + at["w"] <= 24
