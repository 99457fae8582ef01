"""One address is one replica, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.config_sources import parse_config
from bucket_lora_proxy.membership.rule import AllowRule, origin_of
from bucket_lora_proxy.upstream import Origin

SAME = [
    ("http://a", ["HTTP://A", "http://a.", "http://a:80", "http://A.:080/", "http://a/"]),
    ("https://a", ["https://a:443", "https://A.:443//"]),
    ("http://a:443", ["http://A:443", "http://a.:0443"]),
    ("http://[fd00::1]:81", ["http://[FD00:0:0::1]:81", "http://[fd00::0:0001]:081"]),
    ("http://10.0.0.1", ["http://10.0.0.1:80"]),
    ("http://a/Prefix", ["http://A:80/Prefix/"]),
]


@pytest.mark.parametrize(("url", "spellings"), SAME)
def test_spellings_of_one_address_are_one_replica(url: str, spellings: list[str]) -> None:
    assert {Origin.parse(one).url for one in [url, *spellings]} == {url}
    assert {Origin.parse(one).authority for one in spellings} == {Origin.parse(url).authority}
    for one in spellings:
        with pytest.raises(ConfigError, match=f"replica {url}".replace("[", r"\[") + " is given 2"):
            parse_config(["--replica", url, "--replica", one], {})


def test_other_addresses_are_other_replicas() -> None:
    urls = ["http://a", "https://a", "http://a:443", "http://a/b", "http://a/B", "http://a.b"]
    assert len({Origin.parse(url).url for url in urls}) == len(urls)


def test_a_name_is_resolved_as_it_is_given_and_its_certificate_has_no_dot() -> None:
    origin = Origin.parse("https://A.example.org.:8443")
    assert (origin.host, origin.tls_name) == ("a.example.org.", "a.example.org")
    assert origin.authority == b"a.example.org:8443"


@pytest.mark.parametrize("url", ["http://a:0", "https://a:00/x", "http://[::1]:0"])
def test_port_0_is_refused_and_not_taken_for_the_schemes_own(url: str) -> None:
    with pytest.raises(ConfigError, match="names port 0; use 1 to 65535"):
        Origin.parse(url)
    with pytest.raises(ConfigError, match="names port 0"):
        origin_of(url, [AllowRule.parse("http://a"), AllowRule.parse("https://a")])


@pytest.mark.parametrize("url", ["http://.", "http://.:80", "http://:80"])
def test_an_address_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not http"):
        Origin.parse(url)


def test_a_replica_gets_its_own_token_however_its_address_is_written(tmp_path: Path) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text('replica = [{url = "HTTPS://A.example.org:443/", token_env = "OWN"}]')
    config = parse_config(["--config", str(path)], {"OWN": "token-0123456789abcdef"})
    assert config.token_of(config.replicas[0]) == "token-0123456789abcdef"


def test_an_address_of_a_bucket_has_the_spelling_of_the_one_that_is_given() -> None:
    rules = [AllowRule.parse("http://[fd00::]/8:*")]
    found, _ = origin_of("http://[fd00:0::1]:80/", rules)
    assert found == Origin.parse("http://[FD00::1]")
