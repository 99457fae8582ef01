"""A stand-in for the public recipe's proxy, to measure beside ours: written anew, in its shape.

    python benchmarks/proxy_recipe.py PORT REPLICA_PORT…

An aiohttp server and client; routes by prefix with a blake2b hash over the JSON of each block of 16
token ids, to the replica that had the longest prefix unless it is much busier than the least busy.
"""

from __future__ import annotations

import hashlib
import json
import sys

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

BLOCK = 16
MAX_GAP = 16


class Recipe:
    """One proxy."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.busy = [0] * len(urls)
        self.holders: dict[bytes, int] = {}
        self.client: ClientSession | None = None

    def route(self, model: str, prompt: list[int] | str) -> int:
        """Pick a replica, and note that it will hold the prompt."""
        digest, best, hashes = model.encode(), -1, []
        size = 4 * BLOCK if isinstance(prompt, str) else BLOCK
        for start in range(0, len(prompt) - size + 1, size):
            block = json.dumps(prompt[start : start + size]).encode()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            hashes.append(digest)
            best = self.holders.get(digest, best)
        least = min(range(len(self.urls)), key=self.busy.__getitem__)
        if best < 0 or self.busy[best] - self.busy[least] > MAX_GAP:
            best = least
        for digest in hashes:
            self.holders[digest] = best
        return best

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Forward one generation."""
        body = await request.json()
        where = self.route(body["model"], body["prompt"])
        assert self.client is not None
        self.busy[where] += 1
        try:
            url = self.urls[where] + request.path
            async with self.client.post(url, json=body) as answer:
                if not body.get("stream"):
                    return web.Response(
                        body=await answer.read(),
                        status=answer.status,
                        content_type=answer.content_type,
                    )
                stream = web.StreamResponse(status=answer.status)
                stream.content_type = answer.content_type
                await stream.prepare(request)
                async for piece in answer.content.iter_any():
                    await stream.write(piece)
                await stream.write_eof()
                return stream
        finally:
            self.busy[where] -= 1


def main() -> None:
    """Serve until killed."""
    port, *replicas = sys.argv[1:]
    recipe = Recipe([f"http://127.0.0.1:{replica}" for replica in replicas])
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/completions", recipe.generate)

    async def start(app: web.Application) -> None:
        recipe.client = ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)
        )

    async def stop(app: web.Application) -> None:
        if recipe.client is not None:
            await recipe.client.close()

    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
