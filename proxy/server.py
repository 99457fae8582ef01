"""Runs the app under uvicorn."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from typing import cast

import uvicorn

from bucket_lora_proxy.app import Deps, build_deps, create_app
from bucket_lora_proxy.certificates import served_certificate
from bucket_lora_proxy.client_connection import ClientConnection
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.listener import Listener

log = logging.getLogger("bucket_lora_proxy")

CLIENT_KEEP_ALIVE_S = 75
"""Idle time after which a client's connection is closed: above the 15 s of aiohttp's pool and the
60 s of common load balancers, so that the client, not the proxy, ends it."""


class Server(uvicorn.Server):
    """uvicorn, with one line that says where the proxy can be reached."""

    def __init__(self, config: ProxyConfig, *, deps: Deps | None = None) -> None:
        self._proxy = config
        self.deps = deps or build_deps(config)
        self.ready = asyncio.Event()
        """Set once the port is open."""
        cert, key = served_certificate(config)
        super().__init__(
            uvicorn.Config(
                create_app(self.deps),
                host=config.host,
                port=config.port,
                loop="uvloop",
                http=ClientConnection,
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=CLIENT_KEEP_ALIVE_S,
                ssl_certfile=cert,
                ssl_keyfile=key,
                ssl_ca_certs=str(config.client_ca) if config.client_ca else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if config.client_ca else ssl.CERT_NONE,
            )
        )

        # Declared as whole seconds, and only ever the timeout of a wait; 0.5 must not become 0.
        self.config.timeout_graceful_shutdown = cast(int, config.shutdown_s)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as the configuration says, until told to stop."""
        await super().serve([self._bind()] if sockets is None else sockets)

    def _bind(self) -> socket.socket:
        host, port = self._proxy.host, self._proxy.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=self.config.backlog)
        except OSError as error:
            log.error("cannot listen on %s port %d: %s", host, port, error.strerror or error)
            sys.exit(1)

    def _protocol(self) -> ClientConnection:
        forwarder = self.deps.forwarder
        return ClientConnection(self.config, self.server_state, self.lifespan.state, forwarder)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup([])
        listeners = [Listener(one, self._protocol, self.config.ssl) for one in sockets or ()]
        self.servers = cast(list[asyncio.Server], listeners)
        self.ready.set()
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                scheme = "https" if self._proxy.serves_tls else "http"
                shown = f"[{host}]" if ":" in host else host
                bucket = self._proxy.bucket
                log.info(
                    "ready on %s://%s:%d, %d replicas%s, %s",
                    scheme,
                    shown,
                    port,
                    len(self._proxy.replicas),
                    f" and those in {bucket}" if bucket else "",
                    f"{len(self._proxy.tokens)} tokens" if self._proxy.tokens else "no token",
                )
