from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.json_logs import LOG_ENV, PACKAGES, JsonFormatter, about, set_up_logs


def line(
    message: str, *args: object, formatter: JsonFormatter | None = None, **extra: object
) -> dict[str, Any]:
    record = logging.LogRecord("adapter_bucket.x", logging.INFO, "x.py", 1, message, args, None)
    vars(record).update(extra)
    text = (formatter or JsonFormatter()).format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def restored_loggers() -> Iterator[None]:
    before = {
        name: (log.handlers, log.level, log.propagate)
        for name in PACKAGES
        for log in [logging.getLogger(name)]
    }
    yield
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_line_has_the_fields_of_the_process_and_of_the_call() -> None:
    found = line("version %d\nready", 3, formatter=JsonFormatter(part="trainer", run="r"),
                 **about(version=3))  # fmt: skip
    assert found["message"] == "version 3\nready"
    assert (found["part"], found["run"], found["version"]) == ("trainer", "r", 3)
    assert found["level"] == "info"
    assert len(found["trace_id"]) == 32


def test_what_a_line_is_not_about_is_left_out() -> None:
    assert not {"run", "version", "replica", "trace_id", "error"} & line("hello").keys()


def test_values_of_secret_variables_and_logins_in_urls_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BUCKET_LORA_TOKEN", "proxy-token-1")
    monkeypatch.setenv("BUCKET_LORA_PROXY_TOKEN", "old-token new-token")
    monkeypatch.setenv("BUCKET_LORA_SIGNING_KEYS", "key-name:00112233445566778899")
    found = line(
        "proxy-token-1 old-token new-token 00112233445566778899 http://x:any-login@host/ key-name"
    )
    assert found["message"] == "*** *** *** *** http://***@host/ key-name"


def test_an_exception_is_part_of_the_line_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    try:
        raise ValueError("refused hf_secret_value")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "it failed", (), sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert "ValueError: refused ***" in found["error"]


@pytest.mark.usefixtures("restored_loggers")
def test_without_the_switch_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOG_ENV, raising=False)
    before = [logging.getLogger(name).handlers for name in PACKAGES]
    assert not set_up_logs("trainer", run="r")
    assert [logging.getLogger(name).handlers for name in PACKAGES] == before


@pytest.mark.usefixtures("restored_loggers")
def test_set_up_twice_writes_each_line_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG_ENV, "json")
    assert set_up_logs("replica")
    assert set_up_logs("replica", replica="r-1")
    logging.getLogger("vllm_bucket_lora.watcher").info("following run a", extra=about("a"))
    (text,) = capsys.readouterr().err.splitlines()
    assert json.loads(text)["replica"] == "r-1"


@pytest.mark.usefixtures("restored_loggers")
def test_the_lines_of_a_trainers_rank_say_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG_ENV, "json")
    monkeypatch.setenv("RANK", "3")
    set_up_logs("trainer", run="r")
    logging.getLogger("trl_async_bucket.ranks").error("it failed")
    assert json.loads(capsys.readouterr().err)["rank"] == "3"


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_ENV, "xml")
    with pytest.raises(ConfigError, match="BUCKET_LORA_LOG is 'xml'; use json"):
        set_up_logs("trainer")
