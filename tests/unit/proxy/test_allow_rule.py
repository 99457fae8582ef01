from __future__ import annotations

import pytest

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.membership.rule import AllowRule, origin_of


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("https://replica.example.org", "https://replica.example.org"),
        ("https://replica.example.org", "https://replica.example.org:443/"),
        ("https://*.example.org", "https://a.example.org"),
        ("https://*.example.org", "https://a.b.example.org"),
        ("https://*.EXAMPLE.org", "https://A.example.ORG"),
        ("https://job-*.example.org:*", "https://job-7a.example.org:8443"),
        ("http://vllm-*:8000", "http://vllm-12:8000"),
        ("http://10.0.0.0/8:8000", "http://10.1.2.3:8000"),
        ("http://10.1.2.3:8000", "http://10.1.2.3:8000"),
        ("http://[fd00::]/8:8000", "http://[fd00::1]:8000"),
    ],
)
def test_an_address_that_a_pattern_covers_is_allowed(pattern: str, url: str) -> None:
    rule = AllowRule.parse(pattern)
    assert origin_of(url, [rule])[1] is rule


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("https://*.example.org", "http://a.example.org:443"),  # a token in the clear
        ("https://*.example.org", "https://a.example.org:8443"),
        ("https://*.example.org", "https://example.org"),
        ("https://*.example.org", "https://a.example.org.evil.net"),
        ("https://*.example.org", "https://evilexample.org"),
        ("https://*.example.org", "https://a.example.org."),
        ("https://*.example.org", "https://evil.net/.example.org"),
        ("https://*.example.org", "https://evil.net#.example.org"),
        ("https://*.example.org", "https://evil.net?.example.org"),
        ("https://*.example.org", "https://x@a.example.org"),
        ("https://*.example.org", "https://a_b.example.org\\@evil.net"),
        ("https://*.example.org", "https://a.example.org/prefix"),
        ("https://job-*.example.org", "https://job-a.b.example.org"),
        ("https://job-*.example.org", "https://job-.example.org"),
        ("http://vllm-*:8000", "http://vllm-1.evil.net:8000"),
        ("http://10.0.0.0/8:8000", "http://11.0.0.1:8000"),
        ("http://10.0.0.0/8:8000", "http://10.0.0.1.evil.net:8000"),
        ("http://10.0.0.0/8:8000", "http://0x0a000001:8000"),
        ("http://10.0.0.0/8:8000", "http://167772161:8000"),
        ("http://10.0.0.0/8:8000", "http://10.1:8000"),
        ("http://10.0.0.0/8:8000", "http://[::ffff:10.0.0.1]:8000"),
        ("http://10.0.0.0/8:*", "file:///etc/passwd"),
        ("http://10.0.0.0/8:*", "http://10.0.0.1:99999"),
        ("http://[fd00::]/8:*", "http://[fe80::1%25eth0]:8000"),
    ],
)
def test_any_other_address_is_refused(pattern: str, url: str) -> None:
    with pytest.raises(ConfigError):
        origin_of(url, [AllowRule.parse(pattern)])


def test_without_a_pattern_nothing_is_allowed() -> None:
    with pytest.raises(ConfigError, match="no --allow-replica pattern"):
        origin_of("https://a.example.org", [])


def test_one_address_has_one_spelling() -> None:
    rules = [AllowRule.parse("http://a:*"), AllowRule.parse("http://[::1]:*")]
    spellings = ["http://a:80", "http://A", "http://a/", "http://a:080"]
    assert {origin_of(url, rules)[0].url for url in spellings} == {"http://a"}
    assert origin_of("http://[0:0::1]:81", rules)[0].url == "http://[::1]:81"


@pytest.mark.parametrize(
    "pattern",
    [
        "https://*",
        "https://*.*",
        "https://*:*",
        "http://0.0.0.0/0:*",
        "http://[::]/0:*",
        "http://10.0.0.*:8000",
        "http://10.0.0.1/8",
        "http://10.0.0.0/33",
        "http://name/8",
        "http://host:0",
        "http://host:70000",
        "host:8000",
        "ftp://host",
        "https://host/path",
        "https://user@host",
        "https://[host]",
        "",
    ],
)
def test_a_pattern_that_is_none_or_allows_everything_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--allow-replica"):
        AllowRule.parse(pattern)


def test_a_rules_token_stands_in_no_representation() -> None:
    assert "secret" not in repr(AllowRule.parse("https://a", token="secret"))
