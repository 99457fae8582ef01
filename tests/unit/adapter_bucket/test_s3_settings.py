"""Settings from options, URL and environment; the Hugging Face URL; what open_store refuses."""

from __future__ import annotations

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.s3_settings import make_client, parse_s3_url
from adapter_bucket.stores import open_store


def test_the_url_sets_what_the_environment_does_not() -> None:
    settings = parse_s3_url(
        "s3://b/p/q/?endpoint_url=http://127.0.0.1:9&region=eu&deadline_s=5&max_attempts=2"
        "&checksums=when_required&conditional_writes=no"
    )
    assert (settings.bucket, settings.prefix) == ("b", "p/q/")
    assert (settings.deadline_s, settings.max_attempts) == (5.0, 2)
    assert settings.conditional_writes == "no"


def test_an_option_wins_over_the_url() -> None:
    assert parse_s3_url("s3://b?deadline_s=5", deadline_s=7).deadline_s == 7


def test_credentials_are_options_and_never_shown() -> None:
    settings = parse_s3_url("s3://b", access_key_id="AKID", secret_access_key="hush")
    assert "hush" not in repr(settings)
    for url in ("s3://AKID:hush@b/p", "s3://b?secret_access_key=hush"):
        with pytest.raises(ConfigError) as caught:
            parse_s3_url(url)
        assert "hush" not in str(caught.value)


def test_a_hugging_face_bucket_is_a_gateway_url() -> None:
    settings = parse_s3_url("hf://buckets/owner/name/some/prefix")
    assert settings.endpoint_url == "https://s3.hf.co/owner"
    assert (settings.bucket, settings.prefix) == ("name", "some/prefix/")
    assert (settings.addressing_style, settings.region) == ("path", "us-east-1")
    with pytest.raises(ConfigError, match="hf://buckets/owner/name"):
        parse_s3_url("hf://buckets/owner")


@pytest.mark.parametrize(
    ("endpoint", "checksums", "style"),
    [
        ("http://127.0.0.1:9", "when_required", "path"),
        ("https://s3.eu-west-1.amazonaws.com", "when_supported", "auto"),
    ],
)
def test_off_aws_checksums_are_off_and_addressing_is_by_path(
    endpoint: str, checksums: str, style: str
) -> None:
    settings = parse_s3_url(f"s3://b?endpoint_url={endpoint}&region=eu-west-1")
    config = make_client(settings).meta.config
    assert config.request_checksum_calculation == checksums  # type: ignore[attr-defined]
    assert config.s3["addressing_style"] == style  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "url",
    [
        "s3:///p",
        "s3://b?unknown=1",
        "s3://b?deadline_s=never",
        "s3://b?deadline_s=0",
        "s3://b?part_bytes=1",
        "s3://b?addressing_style=both",
        "ftp://b",
        "/plain/path",
        "hf://models/a/b",
        "file://relative",
        "file:///no/such/parent/dir",
    ],
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_memory_bucket_is_one_per_name() -> None:
    assert open_store("memory://a") is open_store("memory://a")
    assert open_store("memory://a") is not open_store("memory://b")
    with pytest.raises(ConfigError, match="no options"):
        open_store("memory://a", region="eu")
