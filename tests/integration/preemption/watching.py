"""Watches a bucket and a replica while trainers die: what was published, what was said and served.

Nothing here judges but the reader of the bucket, which may believe only what is whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from adapter_bucket.checkpoint_fetch import fetch_checkpoint
from adapter_bucket.errors import NotPublished
from adapter_bucket.fetch import RunReader, fetch_version
from adapter_bucket.layout import adapter_name, parse_adapter_name
from adapter_bucket.store import Store
from demo.fleet import Server

PROMPT = tuple(range(1, 9))
"""Tokens of the kind that the trainer trains on."""
TOKENS = 6


@dataclass(frozen=True)
class Ready:
    """The versions that the replica said it had ready."""

    at: float
    """Unix time when its answer was there, seconds."""
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """A greedy answer by a version's name."""

    version: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass
class BucketWatch:
    """Reads all the time what the manifest names, versions and checkpoints, and keeps the files."""

    store: Store
    run_id: str
    folder: Path
    digests: dict[int, set[str]] = field(default_factory=dict)
    """sha256 of the weights under each number."""
    weights: dict[int, Path] = field(default_factory=dict)
    """Each version that could be fetched, as a PEFT adapter directory."""
    checkpoints: set[tuple[int, int]] = field(default_factory=set)
    """(epoch, step)."""

    def __post_init__(self) -> None:
        self._reader = RunReader(self.store, self.run_id)

    def look(self) -> None:
        """Once. Anything torn is an ``IntegrityError``."""
        try:
            manifest = self._reader.poll()
        except NotPublished:
            return
        if manifest is None:
            return
        for entry in manifest.versions:
            self.digests.setdefault(entry.version, set()).add(entry.weights.sha256)
        try:
            if manifest.versions:
                newest = manifest.versions[-1]
                self.weights[newest.version] = fetch_version(
                    self.store, self.run_id, newest, self.folder / "versions"
                )
            if manifest.checkpoints:
                last = manifest.checkpoints[-1]
                place = (last.epoch, last.step)
                if place not in self.checkpoints:
                    out = self.folder / f"{last.epoch}-{last.step}"
                    fetch_checkpoint(self.store, self.run_id, last, out)
                    self.checkpoints.add(place)
        except NotPublished:  # retired meanwhile
            pass


@dataclass
class ReplicaWatch:
    """Asks a replica what it has ready, and for completions by the names of those."""

    server: Server
    run_id: str
    ready: list[Ready] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._asked: set[int] = set()
        self._statuses, self._questions = requests.Session(), requests.Session()

    def look(self) -> None:
        """Ask once what is ready; an answer like the last one is not noted again."""
        answer = self._statuses.get(f"{self.server.url}/bucket_lora/status", timeout=30).json()
        names = [parse_adapter_name(name) for name in answer["ready"]]
        versions = sorted(name[1] for name in names if name and name[0] == self.run_id)
        if versions and (not self.ready or self.ready[-1].versions != tuple(versions)):
            self.ready.append(Ready(time.time(), tuple(versions)))

    def ask_newest(self) -> None:
        """Ask the newest ready version for a completion, unless it was asked before."""
        newest = self.ready[-1].versions[-1] if self.ready else 0
        if newest and newest not in self._asked:
            self._asked.add(newest)
            self.ask(newest)

    def ask(self, version: int) -> int:
        """Ask a version by its name, and note its completion if there is one; the HTTP status."""
        body = {
            "model": adapter_name(self.run_id, version),
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = self._questions.post(f"{self.server.url}/v1/completions", json=body, timeout=30)
        if answer.ok:
            choice = answer.json()["choices"][0]
            logprobs = tuple(choice["logprobs"]["token_logprobs"])
            self.completions.append(Completion(version, tuple(choice["token_ids"]), logprobs))
        return answer.status_code

    def state(self, version: int, *, wait_s: float) -> str:
        """The state of a version, after a wait for it to be ready."""
        about = requests.get(
            f"{self.server.url}/bucket_lora/status",
            params={"adapter": adapter_name(self.run_id, version), "wait": str(wait_s)},
            timeout=wait_s + 30,
        )
        state: str = about.json()["adapter"]["state"]
        return state


class Watching:
    """Does things again and again, each on a thread of its own, until it is left.

    Raises:
        BaseException: on leaving, what one of them raised first.
    """

    def __init__(self, *looks: tuple[Callable[[], None], float]) -> None:
        self._stop = threading.Event()
        self._faults: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=look) for look in looks]

    def __enter__(self) -> Watching:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._faults:
            raise self._faults[0]

    def _run(self, look: Callable[[], None], pause_s: float) -> None:
        try:
            while not self._stop.wait(pause_s):
                look()
        except BaseException as error:
            self._faults.append(error)


class Truth:
    """Log-probabilities by transformers and PEFT in float32, from an adapter's files.

    Args:
        model: Directory of the base model.
    """

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def difference(self, adapter: Path, completion: Completion) -> float:
        """Largest difference of any token's log-probability from the completion's, nats."""
        import torch
        from peft import PeftModel

        policy = PeftModel.from_pretrained(self._base, str(adapter)).eval()
        try:
            ids = torch.tensor([[*PROMPT, *completion.tokens]])
            with torch.no_grad():
                scores = policy(input_ids=ids).logits[0].log_softmax(-1)
            places = torch.arange(len(PROMPT) - 1, ids.shape[1] - 1)
            true = scores[places, torch.tensor(completion.tokens)]
            return float((true - torch.tensor(completion.logprobs)).abs().max())
        finally:
            policy.unload()
