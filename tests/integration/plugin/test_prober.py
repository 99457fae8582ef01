"""Which engines are asked about a probe, how, and what their answers lead to."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from adapter_bucket.probe import Probe, make_probe
from vllm_bucket_lora.ports import LoadRefused, ProbeFailed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM meets deprecations inside torch
    from vllm_bucket_lora.prober import EngineProber

pytestmark = pytest.mark.slow

OWN, PLAIN = [-1.0, -2.0], [-1.0, -4.0]
PROBE = make_probe([5, 6, 7], OWN, dtype="float32", base_logprobs=PLAIN)


class Engines:
    """Answers as vLLM's client does, each engine with its own log-probabilities."""

    def __init__(self, *answers: list[float], mode: str = "raw_logprobs") -> None:
        self._answers = answers
        self.asked: list[tuple[int | None, bool]] = []
        self.params: Any = None
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(logprobs_mode=mode),
            parallel_config=SimpleNamespace(
                data_parallel_size=len(answers),
                data_parallel_size_local=1,
                local_engines_only=False,
            ),
        )

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **given: Any
    ) -> AsyncIterator[Any]:
        rank, with_adapter = given["data_parallel_rank"], given["lora_request"] is not None
        self.asked.append((rank, with_adapter))
        self.params = params
        values = self._answers[rank or 0] if with_adapter else PLAIN
        tokens = prompt["prompt_token_ids"]
        found = [{t: SimpleNamespace(logprob=v)} for t, v in zip(tokens[1:], values, strict=True)]
        yield SimpleNamespace(prompt_logprobs=[None, *found])


class Silent(Engines):
    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield


class Broken(Engines):
    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise ValueError("the prompt has 300 tokens")
        yield


def check(engines: Engines, probe: Probe = PROBE, limit_s: float = 30.0) -> None:
    asyncio.run(EngineProber(engines, limit_s=limit_s).check(object(), probe))


def test_every_engine_is_asked_with_and_without_the_adapter() -> None:
    engines = Engines(OWN, OWN)
    check(engines)
    assert sorted(engines.asked) == [(0, False), (0, True), (1, False), (1, True)]
    assert engines.params.skip_reading_prefix_cache
    assert (engines.params.prompt_logprobs, engines.params.max_tokens) == (0, 1)


def test_a_single_engine_is_not_named_and_the_base_only_asked_if_it_matters() -> None:
    engines = Engines(OWN)
    check(engines, make_probe([5, 6, 7], OWN, dtype="float32"))
    assert engines.asked == [(None, True)]


def test_one_engine_that_is_wrong_fails_the_version_and_is_named() -> None:
    with pytest.raises(ProbeFailed, match="on engine 1: with the adapter"):
        check(Engines(OWN, PLAIN))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_cannot_be_compared(mode: str) -> None:
    with pytest.raises(LoadRefused, match=f"--logprobs-mode {mode}; use raw_logprobs"):
        check(Engines(OWN, mode=mode))


def test_an_engine_that_does_not_answer_is_asked_again_later() -> None:
    with pytest.raises(TimeoutError):
        check(Silent(OWN), limit_s=0.05)


def test_a_probe_that_vllm_rejects_is_refused_with_its_reason() -> None:
    with pytest.raises(LoadRefused, match="the prompt has 300 tokens"):
        check(Broken(OWN))
