"""The public recipe through the proxy: stock TRL, two stock vLLM servers on one folder, no plugin.

The trainer takes the proxy for one server. It has no setting for a token, so the token stands in
the server's address.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from demo.fleet import Server, start_stock_server, start_trainer, wait_healthy
from demo.observe import read_metrics
from demo.processes import Child, Processes, free_port
from demo.tiny_model import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
TOKEN = "recipe-token-0123456789"


@dataclass
class Recipe:
    """What is left when the trainer has ended."""

    servers: list[Server]
    proxy: Server
    trainer: Child
    rows: list[dict[str, Any]]
    model: Path

    def metric(self, name: str) -> dict[str, float]:
        """Values of one of the proxy's metrics, by its first label."""
        text = requests.get(f"{self.proxy.url}/metrics", timeout=5).text
        return {
            next(iter(sample.labels.values()), ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def adapters(self, server: Server) -> set[str]:
        cards = requests.get(f"{server.url}/v1/models", timeout=5).json()["data"]
        return {card["id"] for card in cards if card.get("parent")}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipe]:
    out = tmp_path_factory.mktemp("recipe")
    model = build(out / "model", warm_up_steps=2)
    (out / "tokens").write_text(TOKEN)
    with Processes(out / "logs", lambda _name, _line: None) as processes:
        servers = [start_stock_server(processes, model, name=f"stock-{n}") for n in (1, 2)]
        port = free_port()
        command = [
            sys.executable, "-m", "bucket_lora_proxy", "--port", str(port), "--allow-broadcast",
            "--token-file", str(out / "tokens"), *(f"--replica={one.url}" for one in servers),
        ]  # fmt: skip
        url = f"http://x:{TOKEN}@127.0.0.1:{port}"
        proxy = Server(processes.start("proxy", command), url)
        wait_healthy(processes, [*servers, proxy])
        trainer = start_trainer(
            processes, model, url, out / "run", "--stock", "--steps", str(STEPS)
        )
        processes.wait_until(
            "the trainer to end",
            lambda: trainer.process.poll() is not None,
            timeout_s=180,
            watch=[server.child for server in (*servers, proxy)],
        )
        rows = read_metrics(out / "run" / "metrics.jsonl")
        yield Recipe(servers, proxy, trainer, rows, model)


def test_the_unchanged_trainer_takes_all_its_steps(recipe: Recipe) -> None:
    tail = recipe.trainer.log_path.read_text(errors="replace")[-3000:]
    assert recipe.trainer.process.returncode == 0, tail
    steps = [row for row in recipe.rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row["perf/weight_sync_s"] > 0
        assert abs(row["ratio"] - 1) <= 0.05  # what was sampled is what was trained


def test_both_servers_end_with_the_same_versions_and_neither_is_paused(recipe: Recipe) -> None:
    first, second = (recipe.adapters(server) for server in recipe.servers)
    assert first == second
    newest = max(first, key=lambda name: int(name.rpartition("-v")[2]))
    assert (
        int(newest.rpartition("-v")[2]) == STEPS + 1
    )  # a sync before the first step, and after each
    answers = []
    for server in recipe.servers:
        body = {"model": newest, "prompt": [72, 101, 108], "max_tokens": 8, "temperature": 0}
        answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=20)
        answers.append(answer.json()["choices"][0]["text"])
    assert answers[0] == answers[1]


def test_both_servers_did_the_work_and_nothing_failed(recipe: Recipe) -> None:
    sent = recipe.metric("bucket_lora_proxy_replica_requests_total")
    assert len(sent) == 2
    assert min(sent.values()) > 0.3 * max(sent.values())
    assert set(recipe.metric("bucket_lora_proxy_requests_total")) == {"200"}
    assert set(recipe.metric("bucket_lora_proxy_in_flight").values()) == {0.0}
    assert recipe.metric("bucket_lora_proxy_retries_total") == {}


def test_the_token_was_needed_and_is_in_no_log_of_ours(recipe: Recipe) -> None:
    bare = recipe.proxy.url.replace(f"x:{TOKEN}@", "")
    assert requests.get(f"{bare}/health", timeout=5).status_code == 401
    assert requests.post(f"{bare}/pause", timeout=5).status_code == 401
    for child in (recipe.proxy.child, *(server.child for server in recipe.servers)):
        assert TOKEN not in child.log_path.read_text(errors="replace")
