"""vLLM's side of the ``Loader``: the only module of the API server that touches vLLM's internals.

Why it does not call ``OpenAIServingModels.load_lora_adapter``: that one numbers adapters with a
counter of the process, and an engine knows an adapter by its number alone. Two API servers that
load in a different order would give one number to two adapters, and the engine would serve the
wrong weights without a word. Here the number comes from the name, so it is the same everywhere.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import vllm
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from adapter_bucket.base_model import BaseModelRef, architecture_fingerprint
from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import WEIGHTS_FILE, parse_adapter_name
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.ports import LoadRefused
from vllm_bucket_lora.service import Rejection
from vllm_bucket_lora.worker import PREPARE, PREPARED

logger = logging.getLogger(__name__)

PREPARE_MIN_BYTES = 64 * 1024
"""Smaller adapters load in about a millisecond: two more calls would cost more than they save."""
PREPARE_TICK_S, PREPARE_MAX_TICK_S, PREPARE_TICKS = 0.004, 0.05, 200
"""First and longest pause between two questions whether the files are read, and how many: 10 s."""

Admit = Callable[[str], Awaitable[Rejection | None]]
"""Decides about a request by the adapter it names; ``None`` lets it go on."""

_RUN_BITS, _VERSION_BITS = 18, 12
"""vLLM's V2 model runner, the default on GPUs, keeps adapter numbers in signed 32-bit integers."""


def stable_id(name: str) -> int:
    """Number of an adapter: equal in every process and every restart, and never a small one.

    The upper half of the 31-bit range stays clear of vLLM's own counters, which start at 1. Below
    that bit, 18 bits come from the run and 12 are the end of the version number, so that versions
    of one run that are loaded together never meet; ``VllmLoader`` refuses runs that do.
    """
    run_id, version = parse_adapter_name(name) or (name, 0)
    run = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:4]) >> (32 - _RUN_BITS)
    return ((1 << _RUN_BITS | run) << _VERSION_BITS) | version % (1 << _VERSION_BITS)


class VllmLoader:
    """Loads adapters into all engines behind one API server process."""

    def __init__(self, engine_client: Any, models: Any) -> None:
        self._engine = engine_client
        self._models = models
        self._ours: set[str] = set()
        self._numbers: dict[int, str] = {}
        """Which adapter of ours the engine has under a number."""
        self._can_prepare = True

    async def load(self, name: str, path: Path) -> None:
        """See ``ports.Loader.load``. Returns once every engine has it in a slot."""
        async with self._models.lora_resolver_lock[name]:
            taken = name in self._models.lora_requests and name not in self._ours
            if taken or self._models.is_base_model(name):
                raise LoadRefused(
                    f"the name {name!r} is taken by another model of this server; choose another "
                    "run id, or another name in --lora-modules or --served-model-name"
                )
            request = LoRARequest(lora_name=name, lora_int_id=stable_id(name), lora_path=str(path))
            self._claim_number(request.lora_int_id, name)
            await self._prepare(request)
            try:
                # With data parallelism the call goes to every engine, and fails if one does.
                added = await self._engine.add_lora(request)
            except EngineDeadError:
                raise
            except Exception as error:
                raise LoadRefused(f"vLLM does not load it: {error}") from error
            if not added:
                raise LoadRefused("vLLM did not add it, and gave no reason; see its log")
            self._models.lora_requests[name] = request
            self._ours.add(name)

    def _claim_number(self, number: int, name: str) -> None:
        """An engine would take the second adapter of a number for the first, without a word."""
        holder = self._numbers.setdefault(number, name)
        if holder != name:
            raise LoadRefused(
                f"{name} and {holder}, which is loaded, have the same number in vLLM ({number}); "
                "choose another run id for one of them"
            )

    async def _prepare(self, request: LoRARequest) -> None:
        """Have the workers read the files beside their loop, so that adding is only a copy.

        A help, not a condition: what goes wrong here goes wrong in ``add_lora`` as well, with
        vLLM's own words, or does no harm.
        """
        if not self._can_prepare or _weights_bytes(request) < PREPARE_MIN_BYTES:
            return
        name, number, path = request.lora_name, request.lora_int_id, request.lora_path
        try:
            await self._engine.collective_rpc(PREPARE, args=(name, number, path))
            for tick in range(PREPARE_TICKS):
                await asyncio.sleep(min(PREPARE_TICK_S * (1 + tick), PREPARE_MAX_TICK_S))
                if all(await self._engine.collective_rpc(PREPARED, args=(number,))):
                    return
        except EngineDeadError:
            raise
        except Exception:
            self._can_prepare = False
            logger.exception("adapters are read inside the engine loop from now on")

    async def forget(self, name: str) -> None:
        """See ``ports.Loader.forget``."""
        async with self._models.lora_resolver_lock[name]:
            if name in self._ours:
                self._models.lora_requests.pop(name, None)
                self._ours.discard(name)

    def in_flight(self, name: str) -> int:
        """See ``ports.Loader.in_flight``."""
        states = self._engine.output_processor.request_states.values()
        return sum(state.lora_name == name for state in states)

    async def remove(self, name: str) -> None:
        """See ``ports.Loader.remove``. Without it the slot would stay taken until it is needed."""
        self._models.lora_resolver_lock.pop(name, None)
        number = stable_id(name)
        if self._numbers.get(number) != name:
            return  # never loaded, because another one has its number
        try:
            await self._engine.remove_lora(number)
        except EngineDeadError:
            raise
        except Exception:
            # Not worth more than a line: the engine's own LRU frees the slot when it needs one.
            logger.exception("the engine did not free the slot of %s", name)
        self._numbers.pop(number, None)


def _weights_bytes(request: LoRARequest) -> int:
    return (Path(request.lora_path) / WEIGHTS_FILE).stat().st_size


def describe_server(vllm_config: Any, base_model: str) -> Served:
    """What this server serves, from vLLM's configuration.

    Args:
        vllm_config: The engine client's configuration.
        base_model: Name of the base model as given on the command line; vLLM itself may have
            replaced it by a directory.

    Raises:
        ConfigError: LoRA is not enabled.
    """
    model, lora = vllm_config.model_config, vllm_config.lora_config
    if lora is None:
        raise ConfigError("adapters cannot be served without --enable-lora; add it")
    reference = BaseModelRef(
        id=base_model,
        revision=model.revision,
        architecture=architecture_fingerprint(model.hf_config.to_dict()),
    )
    return Served(
        base_model=reference,
        max_loras=lora.max_loras,
        max_lora_rank=lora.max_lora_rank,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version=vllm.__version__,
        logprobs_mode=str(model.logprobs_mode),
        quantization=str(model.quantization or "none"),
    )


def process_rank(vllm_config: Any) -> tuple[int, int]:
    """Rank of this API server process, and how many there are."""
    parallel = vllm_config.parallel_config
    return max(0, parallel._api_process_rank), max(1, parallel._api_process_count)


def hold_requests(models: Any, admit: Admit) -> None:
    """Ask ``admit`` before vLLM answers 404 to a request for an adapter it does not know.

    Wraps the one check that every text route makes. vLLM's own hook for this, the adapter resolver,
    numbers adapters per process and needs ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``, which opens routes
    that load any path. To be removed once a resolver works without it.
    """
    models.bucket_lora_admit = admit
    original = BaseServing._check_model
    if getattr(original, "_bucket_lora", False):
        return

    @functools.wraps(original)
    async def _check_model(self: Any, request: Any) -> Any:
        ask = getattr(self.models, "bucket_lora_admit", None)
        name = request.model
        served = self._is_model_supported(name) or name in self.models.lora_requests
        if ask is not None and not served and (why := await ask(name)) is not None:
            return self.create_error_response(
                why.message, why.type, HTTPStatus(why.code), param="model"
            )
        return await original(self, request)

    _check_model._bucket_lora = True  # type: ignore[attr-defined]
    BaseServing._check_model = _check_model
