from __future__ import annotations

import logging
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from adapter_bucket.errors import ConfigError, StoreUnavailable
from tests.unit.trl_async_bucket.models import status_server
from trl_async_bucket.readiness import ReplicaClient
from trl_async_bucket.server_access import TOKEN_ENV, ServerAccess, give_access

LOGIN = "http://x:a-token%2F1@127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)


def test_without_a_token_the_address_is_all() -> None:
    access = ServerAccess.of("http://host:8000/")
    assert (access.url, access.headers, access.login_url) == (
        "http://host:8000", {}, "http://host:8000",
    )  # fmt: skip


def test_a_login_in_the_address_is_the_token_and_is_not_shown() -> None:
    access = ServerAccess.of(LOGIN)
    assert access.url == "http://127.0.0.1:9"
    assert access.headers == {"Authorization": "Bearer a-token/1"}
    assert "a-token" not in repr(access)


def test_the_variable_wins_and_reaches_clients_that_know_addresses_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "to:ken/@2\n")
    access = ServerAccess.of(LOGIN)
    assert access.headers == {"Authorization": "Bearer to:ken/@2"}
    # What requests and aiohttp make of such an address is Basic authentication with that password.
    prepared = requests.Request("GET", access.login_url).prepare()
    assert prepared.headers["Authorization"] == requests.auth._basic_auth_str("token", "to:ken/@2")


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "ümlaut"])
def test_a_token_that_no_header_can_hold_is_refused_unseen(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv(TOKEN_ENV, token)
    with pytest.raises(ConfigError, match="value not shown") as raised:
        ServerAccess.of("http://host")
    assert token not in str(raised.value)


def test_no_error_about_the_server_shows_the_token() -> None:
    client = ReplicaClient(LOGIN)
    with pytest.raises(StoreUnavailable) as raised:
        client.replicas()
    shown = "".join(traceback.format_exception(raised.value))
    assert "127.0.0.1:9" in shown
    assert "a-token" not in shown


def test_the_login_is_sent_as_a_bearer_token() -> None:
    with status_server() as server:
        server.answers = [(401, {})]
        address = server.url.replace("http://", "http://x:from-the-url@")
        with pytest.raises(ConfigError):
            ReplicaClient(address).replicas()
        assert server.requests[0][1] == "Bearer from-the-url"


def test_trls_client_gets_the_token_and_its_log_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = SimpleNamespace(server_url="")
    give_access(client, ServerAccess.of(LOGIN))
    assert client.server_url == "http://token:a-token%2F1@127.0.0.1:9"
    logger = logging.getLogger(SimpleNamespace.__module__)
    try:
        with caplog.at_level(logging.INFO):
            logger.info("Waiting for vLLM server at %s ...", client.server_url)
    finally:
        logger.filters.clear()
    assert caplog.messages == ["Waiting for vLLM server at http://***@127.0.0.1:9 ..."]


def test_the_rollout_worker_gets_the_token_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl_async_bucket import AsyncGRPOTrainer

    monkeypatch.setenv(TOKEN_ENV, "the-token")
    worker = SimpleNamespace(_loop_kwargs={"vllm_server_url": "http://proxy:8000"})
    trainer: Any = SimpleNamespace(
        rollout_worker=worker,
        args=SimpleNamespace(vllm_server_base_url="http://proxy:8000"),
        _uses_bucket=True,
    )
    AsyncGRPOTrainer._let_rollouts_in(trainer)
    assert worker._loop_kwargs == {"vllm_server_url": "http://token:the-token@proxy:8000"}
    trainer.rollout_worker = None  # on every rank but 0
    AsyncGRPOTrainer._let_rollouts_in(trainer)
