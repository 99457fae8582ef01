"""Puts the parts together in one API server process."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from adapter_bucket.errors import StoreUnavailable
from adapter_bucket.json_logs import set_up_logs
from adapter_bucket.store import Store
from adapter_bucket.stores import open_store
from adapter_bucket.traces import open_traces
from vllm_bucket_lora import engine
from vllm_bucket_lora.cache import VersionCache
from vllm_bucket_lora.claims import NumberClaims
from vllm_bucket_lora.config import config_from_args
from vllm_bucket_lora.goodbye import Note, note_heartbeats
from vllm_bucket_lora.group import ServerGroup
from vllm_bucket_lora.heartbeats import Heart
from vllm_bucket_lora.service import Service
from vllm_bucket_lora.session import join_session
from vllm_bucket_lora.shelf import Shelf
from vllm_bucket_lora.watcher import Watcher
from vllm_bucket_lora.worker import adopt_logging

logger = logging.getLogger(__name__)

OPEN_RETRY_S = 2.0


async def start_service(engine_client: Any, models: Any, args: Namespace) -> Service:
    """Start following the bucket in this API server process.

    Args:
        engine_client: vLLM's handle on all engines of the server.
        models: This process's table of models and adapters.
        args: The parsed command line.

    Raises:
        ConfigError: the server cannot serve adapters from the bucket as it is set up.
    """
    adopt_logging()
    config = config_from_args(args, model=args.model)
    set_up_logs("replica", replica=config.replica_id)
    served = engine.describe_server(engine_client.vllm_config, config.base_model)
    rank, count = engine.process_rank(engine_client.vllm_config)
    config.session_dir.mkdir(parents=True, exist_ok=True)
    join_session(config.session_dir.parent)
    # One thread for reading: runs are followed in the order of need, not all at once.
    reading = ThreadPoolExecutor(1, thread_name_prefix="bucket-lora")
    store = await _open(config.url, reading)
    group = ServerGroup(config.session_dir, rank=rank, count=count)
    service = Service(
        group,
        served=served,
        replica_id=config.replica_id,
        request_wait_s=config.request_wait_s,
    )
    shelf = Shelf(
        engine.VllmLoader(engine_client, models, NumberClaims(config.session_dir / "numbers")),
        VersionCache(store, config.session_dir),
        group,
        executor=reading,
        on_change=service.publish,
        traces=open_traces("replica", config.replica_id),
    )
    watcher = Watcher(
        store,
        shelf,
        group,
        served=served,
        executor=reading,
        pattern=config.runs,
        poll_s=config.poll_s,
        on_change=service.publish,
    )
    service.start(shelf, watcher)
    engine.hold_requests(models, service.admit_request)
    engine.follow_sleep(engine_client, watcher.engine_sleeps, watcher.engine_wakes)
    if group.leader:

        def note(alive: Iterable[str | None]) -> None:
            said = Note(url=config.url, replica_id=config.replica_id, runs=list(alive))
            note_heartbeats(config.session_dir, said)

        heart = Heart(
            store,
            replica_id=config.replica_id,
            url=config.public_url,
            status=service.status,
            executor=ThreadPoolExecutor(1, thread_name_prefix="bucket-lora-heart"),
            note=note,
        )
        service.listen(heart.notice)
        service.spawn(heart.beat(), "heartbeats")
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
