"""Times that are no number, have no end, or lie before now."""

from __future__ import annotations

from dataclasses import fields

import pytest

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.config_flags import flag
from bucket_lora_proxy.config_sources import parse_config

TIMES = [field.name for field in fields(ProxyConfig) if field.name.endswith("_s")]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", TIMES)
def test_a_time_that_is_no_number_of_seconds_is_refused(name: str, value: str) -> None:
    argv = ["--replica", "http://a", f"{flag(name)}={value}"]
    with pytest.raises(ConfigError, match=rf"{flag(name)} is {value}; give it in seconds"):
        parse_config(argv, {})


@pytest.mark.parametrize("name", TIMES)
def test_a_time_below_0_is_refused(name: str) -> None:
    argv = ["--replica", "http://a", f"{flag(name)}=-0.5"]
    with pytest.raises(
        ConfigError, match=rf"{flag(name)} is -0.5; it must be (above 0|0 or above)"
    ):
        parse_config(argv, {})


def test_every_time_is_among_them() -> None:
    assert len(TIMES) >= 13
