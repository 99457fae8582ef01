"""A replica without vLLM: the plugin's watcher, cache, shelf and status, and an engine that only
remembers. ``python -m tests.unit.observability.replica BUCKET_URL FOLDER PORT``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapter_bucket.json_logs import set_up_logs
from adapter_bucket.stores import open_store
from tests.adapters import BASE
from tests.unit.vllm_bucket_lora.harness import watching
from vllm_bucket_lora.acceptance import Served

SERVED = Served(base_model=BASE, max_loras=8, max_lora_rank=8, dtype="float32")


async def main(url: str, folder: Path, port: int) -> None:
    set_up_logs("replica", replica="r-1")
    async with watching(open_store(url), folder, served=SERVED) as bench:

        async def status(request: Request) -> Response:
            query = request.query_params
            answer = await bench.service.answer(query.get("adapter"), float(query.get("wait", 0)))
            return Response(answer.model_dump_json(), media_type="application/json")

        async def models(request: Request) -> Response:
            return JSONResponse({"data": []})

        async def health(request: Request) -> Response:
            return Response()

        app = Starlette(
            routes=[
                Route("/health", health),
                Route("/v1/models", models),
                Route("/bucket_lora/status", status),
            ]
        )
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical")
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
