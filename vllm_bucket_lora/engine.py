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
import importlib.metadata
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
from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.layout import WEIGHTS_FILE, parse_adapter_name
from adapter_bucket.probe import Probe
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.claims import NumberClaims
from vllm_bucket_lora.metrics import forget_adapter
from vllm_bucket_lora.ports import LoadRefused
from vllm_bucket_lora.prober import EngineProber
from vllm_bucket_lora.service import Rejection
from vllm_bucket_lora.worker import PREPARE, PREPARED, SHARES

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

    def __init__(self, engine_client: Any, models: Any, claims: NumberClaims) -> None:
        """Load into the engines behind ``engine_client``, for the table ``models``."""
        self._engine = engine_client
        self._models = models
        self._claims = claims
        self._ours: set[str] = set()
        self._can_prepare = True
        self._shared: bool | None = None
        """Whether all workers read this machine's files; unknown before the first load."""
        self._prober = EngineProber(engine_client)

    async def load(self, name: str, path: Path, probe: Probe | None) -> None:
        """See ``ports.Loader.load``. Returns once every engine has it in a slot and passed.

        No request can name it before: it enters the table of models last.
        """
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
            if probe is not None:
                await self._prober.check(request, probe)
            self._models.lora_requests[name] = request
            self._ours.add(name)

    def _claim_number(self, number: int, name: str) -> None:
        holder = self._claims.claim(number, name)
        if holder != name:
            raise LoadRefused(
                f"{name} and {holder}, which is loaded, have the same number in vLLM ({number}); "
                "choose another run id for one of them"
            )

    async def _prepare(self, request: LoRARequest) -> None:
        """Have the workers read the files beside their loop, so that adding is only a copy.

        On this machine a help, not a condition: what goes wrong here goes wrong in ``add_lora`` as
        well, with vLLM's own words, or does no harm.

        Raises:
            StoreUnavailable: a worker elsewhere has no copy of the adapter yet; try again.
        """
        if not self._can_prepare:
            return
        try:
            if self._shared is None:
                self._shared = all(await self._on_all_workers(SHARES, request.lora_path))
            if self._shared and _weights_bytes(request) < PREPARE_MIN_BYTES:
                return
            left = await self._read_in_workers(request)
        except EngineDeadError:
            raise
        except Exception:
            self._can_prepare = False
            logger.exception("adapters are read inside the engine loop from now on")
            return
        # A worker that brings its own copy must have it: it would fetch it inside the engine loop.
        if left and not self._shared:
            raise StoreUnavailable(f"an engine on another machine has no copy of it yet: {left}")

    async def _read_in_workers(self, request: LoRARequest) -> str:
        """Have every worker read the files. Returns why one has not, or nothing."""
        number = request.lora_int_id
        await self._on_all_workers(PREPARE, request.lora_name, number, request.lora_path)
        for tick in range(PREPARE_TICKS):
            await asyncio.sleep(min(PREPARE_TICK_S * (1 + tick), PREPARE_MAX_TICK_S))
            answers = await self._on_all_workers(PREPARED, number)
            if faults := [answer for answer in answers if isinstance(answer, str)]:
                return str(faults[0])
            if all(answers):
                return ""
        return "it is still being fetched"

    async def _on_all_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker of every engine.

        vLLM's ``collective_rpc`` calls all engines too, but returns the first one's answers only.
        """
        core: Any = getattr(self._engine, "engine_core", None)
        engines = getattr(core, "core_engines", None) or ()
        if len(engines) < 2:
            return list(await self._engine.collective_rpc(method, args=args))
        call = functools.partial(
            core._call_utility_async, "collective_rpc", method, None, args, None
        )
        answers = await asyncio.gather(*(call(engine=engine) for engine in engines))
        return [one for some in answers for one in some]

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

    def tidy(self, name: str) -> None:
        """See ``ports.Loader.tidy``."""
        self._models.lora_resolver_lock.pop(name, None)
        forget_adapter(name)

    async def remove(self, name: str) -> None:
        """See ``ports.Loader.remove``. Without it the slot would stay taken until it is needed."""
        number = stable_id(name)
        if self._claims.holder(number) != name:
            return  # never loaded, because another one has its number
        try:
            await self._engine.remove_lora(number)
        except EngineDeadError:
            raise
        except Exception:
            # The engine's own LRU frees the slot when it needs one. Until then it may take another
            # adapter of the number for this one, so the number stays claimed.
            logger.exception("the engine did not free the slot of %s", name)
            return
        self._claims.release(number)


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
        plugin_version=importlib.metadata.version("trl-async-bucket"),
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


def follow_sleep(
    engine_client: Any, on_sleep: Callable[[], Awaitable[None]], on_wake: Callable[[], None]
) -> None:
    """Be told before the engine goes to sleep, and once it is fully awake again.

    Wraps two methods of this client: vLLM has no hook for either. To be removed once it has.
    """
    sleep, wake_up = engine_client.sleep, engine_client.wake_up

    async def sleeping(*args: Any, **kwargs: Any) -> None:
        await on_sleep()
        try:
            await sleep(*args, **kwargs)
        except BaseException:
            on_wake()
            raise

    async def waking(*args: Any, **kwargs: Any) -> None:
        await wake_up(*args, **kwargs)
        if not await engine_client.is_sleeping():  # weights and KV cache may wake one by one
            on_wake()

    engine_client.sleep, engine_client.wake_up = sleeping, waking
