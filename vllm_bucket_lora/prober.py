"""Asks every engine of the server for the log-probabilities of a probe.

A probe goes the way of any request: same scheduler, same kernels, same adapter slots. vLLM takes
log-probabilities of a prompt before any sampling setting, so they are those of temperature 1, and
it computes such a prompt anew instead of reading the prefix cache. A test holds it to both.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from adapter_bucket.probe import Probe, probe_faults
from vllm_bucket_lora.ports import LoadRefused, ProbeFailed

PROBE_LIMIT_S = 30.0
"""Longest wait for an engine's answer. A paused or very busy engine is asked again later."""

FIRST = -(2**31)
"""Priority: before all others where the scheduler goes by priorities, else ignored."""

LOGPROB_MODES = ("raw_logprobs", "processed_logprobs")
"""Values of ``--logprobs-mode`` with which vLLM gives log-probabilities; the others give logits."""


class EngineProber:
    """Compares the engines with a version's probe."""

    def __init__(self, engine_client: Any, *, limit_s: float = PROBE_LIMIT_S) -> None:
        self._engine = engine_client
        self._limit_s = limit_s

    async def check(self, request: Any, probe: Probe) -> None:
        """Evaluate the probe on every engine, with and without the adapter.

        Args:
            request: vLLM's request for the adapter, which is loaded already.
            probe: Of the version's manifest entry.

        Raises:
            ProbeFailed: an engine does not compute what the trainer computed.
            LoadRefused: the probe cannot be evaluated by this server.
            TimeoutError: no answer in time; the version may be tried again.
        """
        _check_mode(self._engine.vllm_config)
        needs_base = _needs_base(probe)
        for rank in engine_ranks(self._engine.vllm_config.parallel_config):
            try:
                async with asyncio.timeout(self._limit_s):
                    own, base = await asyncio.gather(
                        self._measure(probe, request, rank),
                        self._measure(probe, None, rank) if needs_base else _nothing(),
                    )
            except (EngineDeadError, TimeoutError):
                raise
            except Exception as error:
                raise LoadRefused(f"vLLM does not evaluate its probe: {error}") from error
            _compare(probe, own or [], base, where="" if rank is None else f" on engine {rank}")

    async def _measure(self, probe: Probe, request: Any, rank: int | None) -> list[float]:
        results = self._engine.generate(
            tokens_input(list(probe.token_ids)),
            probe_params(),
            f"bucket-lora-probe-{uuid.uuid4().hex}",
            lora_request=request,
            priority=FIRST,
            data_parallel_rank=rank,
        )
        found: Any = None
        async for output in results:
            found = output.prompt_logprobs or found
        return logprobs_of(found, probe)


def check_offline(llm: Any, request: Any, probe: Probe) -> None:
    """The same for the offline ``LLM``, which has one engine.

    Raises:
        ProbeFailed, LoadRefused: as ``EngineProber.check``.
    """
    _check_mode(llm.llm_engine.vllm_config)
    requests = [request, None] if _needs_base(probe) else [request]
    prompts = [{"prompt_token_ids": list(probe.token_ids)} for _ in requests]
    try:
        answers = llm.generate(prompts, probe_params(), lora_request=requests, use_tqdm=False)
    except Exception as error:
        raise LoadRefused(f"vLLM does not evaluate its probe: {error}") from error
    own, *base = [logprobs_of(answer.prompt_logprobs, probe) for answer in answers]
    _compare(probe, own, base[0] if base else None, where="")


def _check_mode(vllm_config: Any) -> None:
    mode = vllm_config.model_config.logprobs_mode
    if mode not in LOGPROB_MODES:
        raise LoadRefused(
            f"it has a probe, which cannot be compared with --logprobs-mode {mode}; use "
            f"{' or '.join(LOGPROB_MODES)}"
        )


def _needs_base(probe: Probe) -> bool:
    return probe.base_logprobs is not None or probe.effect > 0


def _compare(probe: Probe, own: list[float], base: list[float] | None, *, where: str) -> None:
    if faults := probe_faults(probe, own, base):
        raise ProbeFailed(f"its probe failed{where}: " + "; ".join(faults))


def probe_params() -> Any:
    """Sampling settings of a probe: it wants the prompt's log-probabilities and nothing else."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def logprobs_of(prompt_logprobs: Any, probe: Probe) -> list[float]:
    """Log-probability of each token but the first, out of vLLM's answer."""
    pairs = list(zip(prompt_logprobs or (), probe.token_ids, strict=False))[1:]
    return [float(candidates[token].logprob) for candidates, token in pairs]


def engine_ranks(parallel_config: Any) -> list[int | None]:
    """Engines behind this API server, as ``generate`` names them; ``None``: there is only one."""
    local = getattr(parallel_config, "local_engines_only", False)
    size = parallel_config.data_parallel_size_local if local else parallel_config.data_parallel_size
    return [None] if size <= 1 else list(range(size))


async def _nothing() -> None:
    return None
