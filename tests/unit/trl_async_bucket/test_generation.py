"""The client of the on-policy trainer, against a real HTTP server that answers as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError, StoreUnavailable
from trl_async_bucket.server_access import TOKEN_ENV

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Upstream:
    """What the server answers next, and what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.url = ""

    def serve(self, answer: dict[str, Any] | None = None, *, status: int = 200) -> None:
        choice = {
            "prompt_token_ids": [1], "token_ids": [2],
            "logprobs": {
                "tokens": ["token_id:2"], "token_logprobs": [-0.5], "top_logprobs": [None]
            },
        }  # fmt: skip
        self.answers.append((status, {"choices": [choice], **(answer or {})}))


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    state = Upstream()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.asked.append(json.loads(body))
            state.tokens.append(self.headers.get("Authorization"))
            self._send(*state.answers.pop(0))

        def _send(self, status: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def client(upstream: Upstream, *, retry_s: float = 20.0) -> Any:
    from trl_async_bucket.generation import VersionedClient

    made = VersionedClient(upstream.url, connect_s=5, retry_s=retry_s)
    made.model = "run-v3"
    return made


def generate(made: Any) -> Any:
    return made.generate([[1]], n=1, max_tokens=1)


def test_every_request_names_the_version(upstream: Upstream) -> None:
    upstream.serve({"model": "run-v3"})
    answer = generate(client(upstream))
    assert upstream.asked[0]["model"] == "run-v3"
    assert answer["completion_ids"] == [[2]]


def test_an_answer_by_another_model_is_refused(upstream: Upstream) -> None:
    from trl_async_bucket.generation import WrongVersion

    upstream.serve({"model": "base"})
    with pytest.raises(WrongVersion, match="asked for run-v3 and answered as 'base'"):
        generate(client(upstream))


def test_nothing_is_generated_before_a_version_is_published(upstream: Upstream) -> None:
    made = client(upstream)
    made.model = ""
    with pytest.raises(ConfigError, match="nothing is published"):
        generate(made)
    assert upstream.asked == []


@pytest.mark.parametrize("status", [429, 502, 503])
def test_an_answer_that_passes_by_itself_costs_a_retry(upstream: Upstream, status: int) -> None:
    upstream.serve(status=status)
    upstream.serve({"model": "run-v3"})
    generate(client(upstream))
    assert len(upstream.asked) == 2


def test_retries_end_with_the_servers_words(upstream: Upstream) -> None:
    for _ in range(5):
        upstream.serve({"error": "no replica left"}, status=503)
    with pytest.raises(StoreUnavailable, match=r"503.*no replica left"):
        generate(client(upstream, retry_s=0.5))


def test_what_no_retry_mends_is_an_error_at_once(upstream: Upstream) -> None:
    upstream.serve({"error": "run-v3 was retired"}, status=404)
    with pytest.raises(ConfigError, match=r"404 to a request for run-v3.*was retired"):
        generate(client(upstream))
    assert len(upstream.asked) == 1


def test_the_token_travels(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "s3cret")
    upstream.serve({"model": "run-v3"})
    generate(client(upstream))
    assert upstream.tokens == ["Bearer s3cret"]


def test_a_server_that_is_not_there_is_named() -> None:
    from trl_async_bucket.generation import VersionedClient

    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:1/health"):
        VersionedClient("http://127.0.0.1:1", connect_s=0.5, retry_s=1)


@pytest.mark.parametrize(("uses_bucket", "synced"), [(True, -1), (False, 10)])
def test_each_training_publishes_before_its_first_completions(
    monkeypatch: pytest.MonkeyPatch, uses_bucket: bool, synced: int
) -> None:
    """Also one that goes on from a checkpoint of the step at which the one before ended."""
    from trl_async_bucket.grpo import GRPOTrainer
    from trl_async_bucket.training_run import TrainingRun

    seen: list[int] = []
    monkeypatch.setattr(
        TrainingRun,
        "_inner_training_loop",
        lambda self, *args, **kwargs: seen.append(self._last_loaded_step),
    )
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer._uses_bucket, trainer._last_loaded_step = uses_bucket, 10
    trainer._inner_training_loop()
    assert seen == [synced]


def test_the_installed_trl_has_the_seam_and_others_do_not() -> None:
    from adapter_bucket.errors import UnsupportedUpstream
    from trl_async_bucket.compat.grpo import check_seam, import_generation, import_trl

    trainer = import_trl()[1]
    generation, versioned = import_generation()
    check_seam(trainer, generation, versioned)

    class OtherSync(generation):  # type: ignore[misc, valid-type]
        def sync_weights(self, force: bool) -> None: ...

    class OtherConstructor(trainer):  # type: ignore[misc, valid-type]
        def __init__(self) -> None: ...

    with pytest.raises(UnsupportedUpstream, match="sync_weights"):
        check_seam(trainer, OtherSync, versioned)
    with pytest.raises(UnsupportedUpstream, match="VLLMGeneration"):
        check_seam(OtherConstructor, generation, versioned)
