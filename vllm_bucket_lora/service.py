"""Puts the parts together in one API server process, and holds answers back until they are true."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.status import ReadyState, ReplicaStatus
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from vllm_bucket_lora import engine
from vllm_bucket_lora.acceptance import Served
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.config import BucketLoraConfig, config_from_args
from vllm_bucket_lora.group import TICK_S, ServerGroup, ServerState
from vllm_bucket_lora.session import join_session
from vllm_bucket_lora.shelf import Shelf
from vllm_bucket_lora.status import adapter_status, join, replica_status, view_of
from vllm_bucket_lora.watcher import Watcher

logger = logging.getLogger(__name__)

OPEN_RETRY_S = 2.0


class Service:
    """The watcher of this process, and its readiness as others may ask for it."""

    def __init__(self, config: BucketLoraConfig, served: Served, group: ServerGroup) -> None:
        self._config = config
        self._served = served
        self._group = group
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.shelf: Shelf
        self.watcher: Watcher

    def start(self) -> None:
        """Begin to follow the bucket."""
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self.watcher.run(), name="bucket-lora-watcher"))
        if not self._group.alone:
            self._tasks.append(loop.create_task(self._follow_group(), name="bucket-lora-group"))

    def publish(self) -> None:
        """Tell waiting clients and the other processes that something changed here."""
        watcher = self.watcher
        views = {
            run.run_id: view
            for run in watcher.runs.values()
            if (view := view_of(run, self.shelf.ready(run.run_id), watcher.admission)) is not None
        }
        self._group.publish(
            ServerState(
                runs=views,
                holds=self.shelf.names,
                admission=watcher.admission,
                fault=watcher.fault,
            )
        )
        self._notify()

    async def answer(self, adapter: str | None, wait_s: float) -> ReplicaStatus:
        """The server's status; with ``adapter``, held back until it is not pending any more."""
        if adapter is None:
            return replica_status(self._joined(), self._served, self._config.replica_id)
        answer = self._answer_about(adapter)
        parsed = parse_adapter_name(adapter)
        if parsed is None or wait_s <= 0 or not _pending(answer):
            return answer
        deadline = asyncio.get_running_loop().time() + wait_s
        with self.watcher.expecting(parsed[0]):
            self._group.wake_others()
            while _pending(answer):
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._changed.wait()
                except TimeoutError:
                    break
                answer = self._answer_about(adapter)
        return answer

    def _answer_about(self, adapter: str) -> ReplicaStatus:
        server = self._joined()
        status = replica_status(server, self._served, self._config.replica_id)
        about = adapter_status(adapter, server, follows=self.watcher.follows)
        return status.model_copy(update={"adapter": about})

    def _joined(self) -> ServerState:
        return join(self._group.states())

    def _notify(self) -> None:
        # Everyone who waits on the old event sees it set; later ones wait on the new one.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _follow_group(self) -> None:
        while True:
            self._group.poll(on_wake=self.watcher.wake, on_change=self._group_changed)
            await asyncio.sleep(TICK_S)

    def _group_changed(self) -> None:
        self._notify()
        if not self._group.leader:
            self.watcher.nudge()


async def start_service(engine_client: Any, models: Any, args: Namespace) -> Service:
    """Start following the bucket in this API server process.

    Raises:
        ConfigError: the server cannot serve adapters from the bucket as it is set up.
    """
    engine.adopt_logging()
    config = config_from_args(args, model=args.model)
    served = engine.describe_server(engine_client.vllm_config, config.base_model)
    rank, count = engine.process_rank(engine_client.vllm_config)
    config.session_dir.mkdir(parents=True, exist_ok=True)
    join_session(config.session_dir.parent)
    # One thread: the store's objects are used by one caller at a time, in the order of need.
    executor = ThreadPoolExecutor(1, thread_name_prefix="bucket-lora")
    store = await _open(config.url, executor)
    group = ServerGroup(config.session_dir, rank=rank, count=count)
    service = Service(config, served, group)
    service.shelf = Shelf(
        engine.VllmLoader(engine_client, models),
        VersionCache(store, config.session_dir),
        group,
        executor=executor,
        on_change=service.publish,
    )
    service.watcher = Watcher(
        store,
        service.shelf,
        group,
        served=served,
        executor=executor,
        pattern=config.runs,
        poll_s=config.poll_s,
        on_change=service.publish,
    )
    service.start()
    logger.info(
        "replica %s follows %s (runs %s), API server %d of %d",
        config.replica_id, store.url, config.runs, rank + 1, count,
    )  # fmt: skip
    return service


async def _open(url: str, executor: Executor) -> Store:
    """Open the store, however long its endpoint is away: it was there when the server started."""
    while True:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, open_store, url)
        except StoreUnavailable as error:
            logger.warning("the server waits for its bucket: %s", error)
            await asyncio.sleep(OPEN_RETRY_S)


def _pending(answer: ReplicaStatus) -> bool:
    return answer.adapter is not None and answer.adapter.state is ReadyState.PENDING
