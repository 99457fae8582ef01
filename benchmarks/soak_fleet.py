"""Parts of the soak: a replica that is killed again and again, rollouts without a trainer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from adapter_bucket.layout import parse_adapter_name
from demo.fleet import Server
from demo.task import LETTERS, MAX_COMPLETION_TOKENS, prompt_for
from tests.integration.plugin.runs import MadeAdapter, TestRun

IN_FLIGHT = 32
"""As many rollouts as the demo's trainer has under way."""


def counted(server: Server, name: str, status: str = "") -> int:
    """Sum of a counter of a server, 0 while it does not answer.

    Args:
        server: Any that has ``/metrics``.
        name: Of the counter.
        status: Count only where the label ``status`` starts with this.
    """
    try:
        text = requests.get(f"{server.url}/metrics", timeout=5).text
    except requests.RequestException:
        return 0
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("status", "").startswith(status)
    )


def answered(replica: Server) -> int:
    """Generations that this process of a replica has ended."""
    return counted(replica, "vllm:request_success_total")


@dataclass
class Mortal:
    """A replica that is killed every ``every`` versions, but never before it served again."""

    server: Server
    start: Callable[[str, int], Server]
    """Starts it again, by a name and at its port."""
    every: int
    end: int
    """The version at which training ends: no kill then."""
    kills: list[int] = field(default_factory=list)
    """The version at each kill."""
    served: list[int] = field(default_factory=list)
    """The version at which it was seen to have answered again, for each kill."""

    def look(self, version: int) -> None:
        """Kill it if that is due; see whether it is back otherwise."""
        if len(self.served) < len(self.kills):
            if answered(self.server):
                self.served.append(version)
        elif self.every * (len(self.kills) + 1) <= version < self.end:
            self.server.child.kill()
            self.kills.append(version)
            name = self.server.child.name.partition(".")[0]
            port = int(self.server.url.rpartition(":")[2])
            self.server = self.start(f"{name}.{len(self.kills)}", port)


class ReadyOrder:
    """Looks whether the newest ready version of a replica ever goes back."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._newest: dict[str, int] = {}
        self.faults: list[str] = []

    def look(self, replica: Server) -> None:
        """Ask it once. A replica that was started again, under another name, begins anew."""
        status = replica.status()
        names = [parse_adapter_name(name) for name in status.ready] if status else []
        newest = max((name[1] for name in names if name and name[0] == self._run_id), default=0)
        name, before = replica.child.name, self._newest.get(replica.child.name, 0)
        if newest < before:
            self.faults.append(f"{name} went from version {before} to {newest}")
        self._newest[name] = max(before, newest)


class Rollouts:
    """Requests like those of the trainer's rollout worker, all by one version of a run of its own.

    Args:
        model: Directory of the base model, with its tokenizer.
        bucket: Folder of the bucket.
        made: The adapter: weights and config.
    """

    def __init__(self, model: Path, bucket: Path, made: MadeAdapter) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        self._prompts = [
            tokenizer.apply_chat_template(
                prompt_for(letter), add_generation_prompt=True, return_dict=False
            )
            for letter in LETTERS
        ]
        run = TestRun(bucket, model, "still", window=1)
        run.publish_made(1, made)
        self._name = run.name(1)
        self._local = threading.local()

    def send(self, replica: Server, count: int, look: Callable[[], None]) -> None:
        """Send so many, ``IN_FLIGHT`` at once, and look around between hundreds of them.

        Raises:
            RuntimeError: one was not answered.
        """
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for start in range(0, count, 100):
                look()
                list(pool.map(lambda seed: self._ask(replica, seed), range(start, start + 100)))
        look()

    def _ask(self, replica: Server, seed: int) -> None:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        body = {
            "model": self._name,
            "prompt": random.Random(seed).choice(self._prompts),
            "max_tokens": MAX_COMPLETION_TOKENS,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self._local.session.post(f"{replica.url}/v1/completions", json=body, timeout=120)
        if not answer.ok:
            raise RuntimeError(f"{self._name}: {answer.status_code} {answer.text[:300]}")
