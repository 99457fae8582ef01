"""Runs of real adapters for the tiny base model, published as a trainer would."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapter_bucket.base_model import BaseModelRef
from adapter_bucket.file_store import FileStore
from adapter_bucket.layout import CONFIG_FILE, WEIGHTS_FILE, version_dir
from adapter_bucket.manifest import RunState
from adapter_bucket.probe import Probe, make_probe
from adapter_bucket.publish import RunWriter
from adapter_bucket.servable import largest_rank
from adapter_bucket.signing import SigningKeys
from adapter_bucket.store import Payload
from tests.integration.plugin.tiny_model import (
    base_ref,
    make_adapter,
    true_logprobs,
    true_tokens,
)

MadeAdapter = tuple[bytes, dict[str, Any]]


KEYS = SigningKeys.parse(f"tests:{'5a' * 32}")
"""Sign what a trainer would publish; a server that was given them believes nothing else."""

Damage = Callable[[bytes], bytes]


def flipped(data: bytes) -> bytes:
    """One bit of the last tensor is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


def cut(data: bytes) -> bytes:
    """The upload ended early."""
    return data[: len(data) // 2]


class DamagingStore(FileStore):
    """Writes other bytes than it was given to every weights file, while told to."""

    damage: Damage | None = None

    def create(self, key: str, data: Payload) -> str:
        if self.damage is not None and key.endswith(WEIGHTS_FILE):
            data = self.damage(bytes(data))
        return super().create(key, data)


class TestRun:
    """One run in a bucket folder, and the truth about each of its versions."""

    __test__ = False

    def __init__(
        self,
        bucket: Path,
        base: Path,
        run_id: str,
        *,
        window: int = 3,
        base_model: BaseModelRef | None = None,
        signing: SigningKeys = KEYS,
    ) -> None:
        self.run_id = run_id
        self._base = base
        self._dir = bucket / "runs" / run_id
        self._store = DamagingStore(bucket)
        self.writer = RunWriter.claim(
            self._store,
            run_id,
            base_model=base_model or base_ref(base),
            window=window,
            writer_id="test",
            signing=signing,
            check=False,  # some of these tests publish what a trainer would refuse to
        )

    def publish(
        self,
        version: int,
        *,
        rank: int = 4,
        weights: bytes | None = None,
        config: dict[str, Any] | None = None,
        probe: Probe | None = None,
        **settings: Any,
    ) -> str:
        """Publish a random adapter; return its model name.

        Args:
            version: Its number, and the seed of its weights.
            rank: LoRA rank.
            weights: Use these bytes instead.
            config: Fields of the adapter config to replace.
            probe: What the server has to compute first.
            settings: More settings of ``LoraConfig``.
        """
        made, adapter_config = make_adapter(self._base, version, rank=rank, **settings)
        largest = largest_rank(adapter_config)
        self.writer.publish(
            version,
            step=version,
            weights=made if weights is None else weights,
            adapter_config={**adapter_config, **(config or {})},
            rank=largest,
            dtype="float32",
            probe=probe,
        )
        return self.name(version)

    def true_probe(self, version: int, tokens: list[int]) -> Probe:
        """The probe that a trainer would give to the version that ``publish`` makes."""
        return self.probe_of(self.make(version), tokens)

    def probe_of(self, made: MadeAdapter, tokens: list[int]) -> Probe:
        """The probe that a trainer would give to this adapter."""
        weights, config = made
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / WEIGHTS_FILE).write_bytes(weights)
            (Path(folder) / CONFIG_FILE).write_text(json.dumps(config))
            own = true_logprobs(self._base, Path(folder), tokens)
        plain = true_logprobs(self._base, None, tokens)
        return make_probe(tokens, own, dtype="float32", base_logprobs=plain)

    def make(self, version: int, *, rank: int = 4) -> MadeAdapter:
        """Make a version's adapter ahead of time."""
        return make_adapter(self._base, version, rank=rank)

    def publish_made(self, version: int, made: MadeAdapter, probe: Probe | None = None) -> None:
        weights, config = made
        self.writer.publish(
            version,
            step=version,
            weights=weights,
            adapter_config=config,
            rank=config["r"],
            dtype="float32",
            probe=probe,
        )

    def publish_damaged(self, version: int, damage: Damage) -> str:
        """Publish an adapter whose object never had the bytes that the manifest promises."""
        self._store.damage = damage
        try:
            return self.publish(version)
        finally:
            self._store.damage = None

    def name(self, version: int) -> str:
        return f"{self.run_id}-v{version}"

    def path(self, version: int) -> Path:
        """The version's directory in the bucket, as PEFT reads it."""
        return self._dir / "adapters" / version_dir(version)

    def truth(self, version: int, tokens: list[int]) -> list[float]:
        return true_logprobs(self._base, self.path(version), tokens)

    def true_tokens(self, version: int, prompt: list[int], count: int) -> list[int]:
        return true_tokens(self._base, self.path(version), prompt, count)

    def finish(self) -> None:
        self.writer.close(RunState.FINISHED)
