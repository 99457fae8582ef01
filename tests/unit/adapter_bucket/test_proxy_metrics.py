"""What `bucket-lora top` reads of a proxy's metrics, and whom it gives the token."""

from __future__ import annotations

import pytest

from adapter_bucket.errors import ConfigError, StoreUnavailable
from adapter_bucket.proxy_metrics import ProxySample, parse_metrics, read_proxy
from adapter_bucket.top_frame import proxy_part
from tests.unit.adapter_bucket.proxy_page import METRICS, metrics_server


def test_metrics_are_parsed_by_name_and_label() -> None:
    sample = ProxySample(0.0, parse_metrics(METRICS))
    assert sample.total("requests_total") == 42
    assert sample.by("in_flight", "replica") == {"http://a:1": 3, "http://b:1": 4}
    assert parse_metrics("bucket_lora_proxy_x oops\nnonsense\n") == {}


def test_rates_are_between_two_samples_and_none_after_a_restart() -> None:
    first = ProxySample(10.0, parse_metrics("bucket_lora_proxy_requests_total 10"))
    second = ProxySample(12.0, parse_metrics("bucket_lora_proxy_requests_total 50"))
    assert proxy_part(second, first, run_id="r")["requests_per_s"] == 20
    assert proxy_part(first, second, run_id="r")["requests_per_s"] is None
    assert proxy_part(first, None, run_id="r")["requests_per_s"] is None
    assert proxy_part(ProxySample(0, parse_metrics(METRICS)), None, run_id="run-1")["lag"] == 2


def test_the_token_is_sent_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(token: str | None) -> tuple[int, str]:
        return (200, METRICS) if token == "Bearer good-token" else (401, "")

    with metrics_server(answer) as proxy:
        monkeypatch.delenv("BUCKET_LORA_TOKEN", raising=False)
        with pytest.raises(ConfigError, match="answers 401: set BUCKET_LORA_TOKEN"):
            read_proxy(proxy)
        monkeypatch.setenv("BUCKET_LORA_TOKEN", "good-token")
        assert read_proxy(proxy + "/").total("requests_total") == 42


def test_no_redirect_is_followed_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET_LORA_TOKEN", "good-token")
    stolen: list[str | None] = []

    def thief(token: str | None) -> tuple[int, str]:
        stolen.append(token)
        return 200, METRICS

    with (
        metrics_server(thief) as elsewhere,
        metrics_server(lambda token: (302, f"{elsewhere}/metrics")) as proxy,
        pytest.raises(StoreUnavailable, match="answers 302"),
    ):
        read_proxy(proxy)
    assert stolen == []


@pytest.mark.parametrize(
    ("address", "message"),
    [("ftp://x", "is not http"), ("localhost:8000", "is not http"), ("http://", "is not http"),
     ("http://x:secret@host", "holds a login")],
)  # fmt: skip
def test_addresses_that_are_none_are_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_proxy(address)
    assert "secret" not in str(raised.value)


def test_something_else_than_a_proxy_is_said() -> None:
    with (
        metrics_server(lambda token: (200, "vllm:num_requests_running 1")) as proxy,
        pytest.raises(StoreUnavailable, match="no metrics of a bucket-lora-proxy"),
    ):
        read_proxy(proxy)
