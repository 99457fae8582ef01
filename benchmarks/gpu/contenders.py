"""The ways of bringing a new adapter version to a loaded server, behind one method: ``swap``."""

from __future__ import annotations

import itertools
import json
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import requests

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.publish import RunWriter
from adapter_bucket.status import STATUS_PATH, ReplicaStatus
from adapter_bucket.stores import open_store
from benchmarks.gpu import shapes

WINDOW = 6
"""Versions kept ready, TRL's default ``max_staleness`` of 4 plus 2; the same for all contenders."""

DIFFERENT = 3
"""How many different adapters are made; versions take them in turn."""


class Contender(Protocol):
    """A way of bringing a new version to a server."""

    def swap(self) -> str:
        """Returns the name of the new version once requests may name it."""


class Adapters:
    """Adapters of one shape and rank, in both forms."""

    def __init__(self, shape: str, rank: int, dtype: str, folder: Path) -> None:
        """Make them.

        Args:
            shape: One of ``shapes.QWEN``.
            rank: LoRA rank.
            dtype: dtype on the wire for bucket versions; pushes are float32, as TRL saves them.
            folder: Where the directories for pushes go.
        """
        import torch

        from trl_async_bucket.adapter_config import portable_config
        from trl_async_bucket.snapshot import SnapshotBuffer, lora_parameters

        self.rank = rank
        self.dtype = dtype
        self.weights: list[bytes] = []
        self.folders: list[Path] = []
        for number in range(DIFFERENT):
            torch.manual_seed(number)
            model = shapes.lora_model(shape, rank, "cpu")
            parameters = lora_parameters(model, "default")
            buffer = SnapshotBuffer(
                {name: tuple(p.shape) for name, p in parameters.items()},
                dtype=getattr(torch, dtype),
                pin_memory=False,
            )
            buffer.fill(parameters)
            self.weights.append(bytes(buffer.data()))
            names = [name for name, _ in model.named_parameters() if ".lora_" in name]
            self.config = portable_config(
                model.peft_config["default"], module_names=names, base_model=f"random/{shape}"
            )
            target = folder / f"rank{rank}-{number}"
            state = {name: p for name, p in model.state_dict().items() if "lora_" in name}
            model.save_pretrained(target, state_dict=state, save_embedding_layers=False)
            _name_modules(target, self.config["target_modules"])
            self.folders.append(target)


def _name_modules(folder: Path, target_modules: Any) -> None:
    """PEFT wrote what it was given; vLLM reads a list."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": target_modules}))


class Bucket:
    """This package: publish to a bucket, wait until the replica says that it is ready."""

    def __init__(
        self, url: str, bucket: Path, run_id: str, model: Path, adapters: Adapters
    ) -> None:
        self._url = url
        self._run_id = run_id
        self._adapters = adapters
        self._writer = RunWriter.claim(
            open_store(f"file://{bucket}"),
            run_id,
            base_model=BaseModelRef(id=str(model), architecture=shapes.architecture(model)),
            window=WINDOW,
            writer_id="benchmark",
        )
        self._versions = itertools.count(1)
        self.newest = 0
        """Which of the adapters the newest version has."""
        self.ready: deque[str] = deque(maxlen=WINDOW)
        """Names of the versions that the server keeps, the newest last."""

    def swap(self) -> str:
        """Returns the name of the new version once requests may name it."""
        version = next(self._versions)
        self.newest = version % DIFFERENT
        self._writer.publish(
            version,
            step=version,
            weights=self._adapters.weights[self.newest],
            adapter_config=self._adapters.config,
            rank=self._adapters.rank,
            dtype=self._adapters.dtype,
        )
        name = f"{self._run_id}-v{version}"
        answer = requests.get(
            f"{self._url}{STATUS_PATH}", params={"adapter": name, "wait": "30"}, timeout=60
        )
        answer.raise_for_status()
        about = ReplicaStatus.model_validate_json(answer.content).adapter
        if about is None or about.state.value != "ready":
            raise RuntimeError(f"{name} is not ready: {about}")
        self.ready.append(name)
        return name


class Mix:
    """No load: names another version that is ready, in turn.

    Requests in flight keep their versions, so a batch holds several adapters after a swap, which
    costs the engine something by itself. This shows that share.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._turns = itertools.count()

    def swap(self) -> str:
        """Returns the name of another version."""
        return self._bucket.ready[next(self._turns) % len(self._bucket.ready)]


class Push:
    """TRL's calls: pause or not, load under a new name, resume, unload the oldest.

    The files are there already, on tmpfs: what PEFT's save costs is measured by ``snapshot``. With
    a pause, TRL saves while the server is paused; here the pause is as short as it can be.
    """

    def __init__(self, url: str, adapters: Adapters) -> None:
        self._url = url
        self._adapters = adapters
        self.pause = False
        """Whether requests stand still meanwhile, as with TRL."""
        self._versions = itertools.count(1)
        self.newest = 0
        """Which of the adapters the newest version has."""

    def swap(self) -> str:
        """Returns the name of the new version once requests may name it."""
        version = next(self._versions)
        name = f"push-v{version}"
        if self.pause:
            self._post("/pause?mode=keep")
        self.newest = version % DIFFERENT
        path = str(self._adapters.folders[self.newest])
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if self.pause:
            self._post("/resume")
        if version > WINDOW:
            self._post("/v1/unload_lora_adapter", {"lora_name": f"push-v{version - WINDOW}"})
        return name

    def _post(self, path: str, body: Any = None) -> None:
        answer = requests.post(f"{self._url}{path}", json=body, timeout=60)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")


def check_answers(url: str, bucket: Bucket, push: Push, prompt: list[int]) -> dict[str, float]:
    """Ask for every adapter by both ways: the answers must not depend on the way.

    Returns:
        Largest difference of a log-probability between the ways, and smallest between adapters.

    Raises:
        RuntimeError: the ways differ, or adapters do not.
    """
    answers: dict[Any, list[float]] = {}
    for contender in (bucket, push):
        for _ in range(DIFFERENT):
            name = contender.swap()
            answers[type(contender), contender.newest] = _logprobs(url, name, prompt)
    numbers = range(DIFFERENT)
    ways = max(_distance(answers[Bucket, n], answers[Push, n]) for n in numbers)
    adapters = min(
        _distance(answers[Bucket, a], answers[Bucket, b]) for a in numbers for b in range(a)
    )
    print(f"answers: ways differ by {ways:.2g}, adapters by {adapters:.2g}", flush=True)
    if not ways < adapters / 10:
        raise RuntimeError("a version loaded from the bucket does not answer as a pushed one")
    return {"ways_differ": ways, "adapters_differ": adapters}


def _logprobs(url: str, model: str, prompt: list[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens: unlike sampled tokens, they always compare."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = requests.post(f"{url}/v1/completions", json={**body, "prompt_logprobs": 0}, timeout=60)
    answer.raise_for_status()
    places = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return [place[str(token)]["logprob"] for place, token in zip(places, prompt[1:], strict=True)]


def _distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
