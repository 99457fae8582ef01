"""Flags before environment before defaults, and errors that name where the value stands."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from adapter_bucket.errors import ConfigError
from adapter_bucket.layout import check_run_id
from vllm_bucket_lora.config import (
    OPTIONS,
    config_from_args,
    load_signing_keys,
    resolve_options,
)


def resolved(environ: dict[str, str], **given: str) -> Namespace:
    args = Namespace(port=8000, **given)
    resolve_options(args, environ)
    args.bucket_lora_session_dir = "/session"
    return args


def test_a_flag_wins_over_the_environment() -> None:
    args = resolved({"BUCKET_LORA_URL": "file:///env"}, bucket_lora_url="file:///flag")
    assert args.bucket_lora_url == "file:///flag"


def test_the_environment_wins_over_the_default() -> None:
    environ = {"BUCKET_LORA_URL": "file:///env", "BUCKET_LORA_POLL_S": "2"}
    config = config_from_args(resolved(environ), model="m")
    assert (config.url, config.poll_s) == ("file:///env", 2.0)


def test_defaults() -> None:
    config = config_from_args(resolved({}, bucket_lora_url="file:///b"), model="org/model")
    assert (config.runs, config.poll_s, config.base_model) == ("*", 0.5, "org/model")
    assert config.session_dir == Path("/session/port-8000")
    assert check_run_id(config.replica_id) == config.replica_id


def test_no_url_is_an_error_that_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match="--bucket-lora-url URL or set BUCKET_LORA_URL"):
        resolved({})


@pytest.mark.parametrize("poll", ["fast", "0", "-1", "nan", "1e9"])
def test_a_malformed_value_names_its_source(poll: str) -> None:
    with pytest.raises(ConfigError, match="--bucket-lora-poll-s="):
        resolved({}, bucket_lora_url="file:///b", bucket_lora_poll_s=poll)
    with pytest.raises(ConfigError, match="BUCKET_LORA_POLL_S="):
        resolved({"BUCKET_LORA_POLL_S": poll}, bucket_lora_url="file:///b")


def test_a_replica_id_must_be_usable_in_a_key() -> None:
    with pytest.raises(ConfigError, match="--bucket-lora-replica-id: run id 'a/b'"):
        resolved({}, bucket_lora_url="file:///b", bucket_lora_replica_id="a/b")


def test_every_option_has_a_flag_and_a_variable() -> None:
    for option in OPTIONS:
        assert option.flag.startswith("--bucket-lora-")
        assert option.env.startswith("BUCKET_LORA_")
        assert option.help


def test_keys_of_a_file_reach_every_process_through_the_environment(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    file = tmp_path / "keys"
    file.write_text(f"k1:{'ab' * 32}\n")
    load_signing_keys(file, environ)
    assert environ == {"BUCKET_LORA_SIGNING_KEYS": f"k1:{'ab' * 32}"}


@pytest.mark.parametrize("text", [None, "", "k1:nothex", "no colon"])
def test_signing_keys_that_cannot_be_used_stop_the_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError):
        load_signing_keys(file, {})


def test_the_url_for_others_names_a_host_they_can_reach() -> None:
    args = resolved({}, bucket_lora_url="file:///b")
    args.host = "0.0.0.0"
    assert "0.0.0.0" not in config_from_args(args, model="m").public_url
    args.host, args.ssl_certfile = "10.1.2.3", "cert.pem"
    assert config_from_args(args, model="m").public_url == "https://10.1.2.3:8000"
    named = resolved({}, bucket_lora_url="file:///b", bucket_lora_public_url="https://r1.example/")
    assert config_from_args(named, model="m").public_url == "https://r1.example"
