"""A tiny PEFT model, and a status server that answers from the real bucket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from adapter_bucket.base_model import architecture_fingerprint
from adapter_bucket.errors import BucketError
from adapter_bucket.fetch import RunReader
from adapter_bucket.layout import parse_adapter_name
from adapter_bucket.status import STATUS_PATH
from adapter_bucket.store import Store


def tiny_peft_model(**lora: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        name_or_path="tiny/base",
    )
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], **lora}
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(**settings))
    train_one_step(model)
    return model


def train_one_step(model: Any) -> None:
    """Move every LoRA factor, as an optimizer step does."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def replica_status(model: Any, **changes: Any) -> dict[str, Any]:
    """What a replica that serves the model's base says of itself."""
    return {
        "replica_id": "r1",
        "base_model": "tiny/base",
        "architecture": architecture_fingerprint(model.config.to_dict()),
        "dtype": "float32",
        "max_loras": 8,
        "max_lora_rank": 8,
        **changes,
    }


class StatusServer:
    """Plays a replica: its statuses can be scripted, or read from a bucket. No vLLM behind it."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        """Scripted (HTTP status, body) pairs; the last one is repeated."""
        self.store: Store | None = None
        """If set, an adapter is ready once its version is in the manifest of this bucket."""
        self.damaged: set[str] = set()
        """Adapters that it could not verify."""
        self.base: dict[str, Any] = {}
        self.requests: list[tuple[dict[str, list[str]], str | None]] = []
        self.url = ""

    def answer(self, query: dict[str, list[str]]) -> tuple[int, Any]:
        if self.answers:
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        body = dict(self.base)
        if "adapter" in query:
            name = query["adapter"][0]
            state = "ready" if self._published(name) else "pending"
            body["adapter"] = {"name": name, "state": state, "ready_on": int(state == "ready")}
            if state == "ready" and name in self.damaged:
                body["adapter"] = {"name": name, "state": "refused", "retried": True}
        return 200, body

    def _published(self, name: str) -> bool:
        parsed = parse_adapter_name(name)
        if self.store is None or parsed is None:
            return False
        try:
            manifest = RunReader(self.store, parsed[0]).poll()
        except BucketError:
            return False
        return manifest is not None and manifest.entry(parsed[1]) is not None


@contextmanager
def status_server() -> Iterator[StatusServer]:
    state = StatusServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            state.requests.append((query, self.headers.get("Authorization")))
            status, body = state.answer(query) if parts.path == STATUS_PATH else (404, {})
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
