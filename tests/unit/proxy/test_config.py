from __future__ import annotations

import argparse
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from adapter_bucket.errors import ConfigError
from adapter_bucket.heartbeat import Heartbeat, write_heartbeat
from adapter_bucket.status import ReplicaStatus
from adapter_bucket.stores import open_store
from bucket_lora_proxy.__main__ import main
from bucket_lora_proxy.check import report
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.config_flags import build_parser
from bucket_lora_proxy.config_sources import NOT_SETTINGS, parse_config

REPLICA = ["--replica", "http://127.0.0.1:9000"]
TOKEN = "0123456789abcdef"


def test_the_least_configuration_is_a_replica() -> None:
    config = parse_config(REPLICA, {})
    assert [origin.url for origin in config.replicas] == ["http://127.0.0.1:9000"]
    assert (config.host, config.port, config.tokens) == ("127.0.0.1", 8000, ())


def test_every_setting_has_a_flag() -> None:
    flags = {action.dest for action in build_parser()._actions if action.dest != "help"}
    derived = {
        "replicas",
        "allow_replicas",
        "bucket_runs",
        "tokens",
        "replica_token",
        "replica_tokens",
    }
    assert flags - NOT_SETTINGS == {field.name for field in fields(ProxyConfig)} - derived


def test_every_flag_says_what_it_does() -> None:
    for action in build_parser()._actions:
        assert action.help not in (None, argparse.SUPPRESS), action.option_strings


def test_tokens_come_from_a_file_before_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# rotated on Monday\n{TOKEN}1\n\n  {TOKEN}2  \n")
    environ = {"BUCKET_LORA_PROXY_TOKEN": f"{TOKEN}3 {TOKEN}4", "BUCKET_LORA_REPLICA_TOKEN": TOKEN}
    from_file = parse_config([*REPLICA, "--token-file", str(path)], environ)
    assert from_file.tokens == (f"{TOKEN}1", f"{TOKEN}2")
    assert from_file.replica_token == TOKEN
    assert parse_config(REPLICA, environ).tokens == (f"{TOKEN}3", f"{TOKEN}4")


def test_no_token_stands_in_the_representation() -> None:
    config = parse_config(REPLICA, {"BUCKET_LORA_PROXY_TOKEN": TOKEN})
    assert TOKEN not in repr(config)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no token"),
        (b"# only a comment\n", "holds no token"),
        (b"short\n", "line 1 .* has 5 characters; use at least 16"),
        (b"0123456789abcdef 0123456789abcdef\n", "holds a space"),
        ("0123456789abcdefé\n".encode(), "cannot be read as ASCII"),
    ],
)
def test_a_token_file_that_cannot_work_is_refused_without_showing_it(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_config([*REPLICA, "--token-file", str(path)], {})
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no replica is given; add --replica"),
        ([*REPLICA, "--replica", "http://127.0.0.1:9000/"], "is given 2 times"),
        (["--replica", "127.0.0.1:9000"], "is not http"),
        (["--replica", "ftp://x"], "is not http"),
        (["--replica", "http://h/?a=b"], "is not http"),
        (["--replica", "http://h:99999"], "not valid"),
        (["--replica", "http://h/\r\nx"], "is not http|printable"),
        (["--replica", "http://user:secret@h"], "holds credentials"),
        ([*REPLICA, "--tls-cert", "/nowhere"], "belong together"),
        ([*REPLICA, "--replica-ca", "/nowhere"], "/nowhere is not a readable file"),
        ([*REPLICA, "--replica-cert", "/nowhere"], "--replica-cert and --replica-key belong"),
        ([*REPLICA, "--client-ca", "/nowhere"], "--client-ca needs TLS"),
        (
            [*REPLICA, "--dev-cert", "/d", "--tls-cert", "/a", "--tls-key", "/b"],
            "--dev-cert and --tls-cert exclude each other",
        ),
        ([*REPLICA, "--dev-cert", "/d", "--host", "0.0.0.0"], "and a token|a token"),
        ([*REPLICA, "--poll-s", "0"], "--poll-s is 0.0; it must be above 0"),
        ([*REPLICA, "--max-attempts", "0"], "--max-attempts is 0; it must be at least 1"),
        (["--bucket", "s3://b"], "--bucket needs --allow-replica"),
        (["--bucket", "b", "--allow-replica", "https://a"], "--bucket 'b' is no bucket URL"),
        (["--bucket", "s3://b", "--allow-replica", "https://*"], "would allow every host"),
        (
            ["--bucket", "s3://b", "--allow-replica", "https://a", "--bucket-run", "../x"],
            "run id '../x' is not valid",
        ),
        ([*REPLICA, "--allow-replica", "https://a"], "need --bucket URL"),
        ([*REPLICA, "--bucket-run", "run"], "need --bucket URL"),
        ([*REPLICA, "--replica", "http://b", "--max-replicas", "1"], "--max-replicas allows 1"),
        ([*REPLICA, "--slow-start-s", "-1"], "--slow-start-s is -1.0"),
        ([*REPLICA, "--replica-token-env", "NO_SUCH"], "NO_SUCH is named .* and is not set"),
        ([*REPLICA, "--host", "0.0.0.0"], "TLS .* and a token .* is missing"),
        ([*REPLICA, "--host", "::"], "--insecure-public-bind"),
        ([*REPLICA, "--host", "example.org"], "can be reached from other machines"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_config(argv, {})
    assert "secret" not in str(caught.value)


def test_a_public_bind_needs_tls_and_token_or_an_explicit_flag(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.touch()
    key.touch()
    tls = ["--tls-cert", str(cert), "--tls-key", str(key)]
    public = [*REPLICA, "--host", "0.0.0.0"]
    token = {"BUCKET_LORA_PROXY_TOKEN": TOKEN}
    with pytest.raises(ConfigError, match="TLS"):
        parse_config(public, token)
    with pytest.raises(ConfigError, match="token"):
        parse_config([*public, *tls], {})
    assert parse_config([*public, *tls], token).host == "0.0.0.0"
    assert parse_config([*public, *tls, "--client-ca", str(cert)], {}).client_ca == cert
    assert parse_config([*public, "--dev-cert", str(tmp_path)], token).serves_tls
    assert parse_config([*public, "--insecure-public-bind"], {}).insecure_public_bind
    assert parse_config([*REPLICA, "--host", "::1"], {}).host == "::1"


def test_two_replica_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 replica tokens"):
        parse_config(REPLICA, {"BUCKET_LORA_REPLICA_TOKEN": f"{TOKEN}1 {TOKEN}2"})


def test_replicas_may_come_from_a_bucket_alone() -> None:
    argv = ["--bucket", "s3://b", "--allow-replica", "https://*.a.org", "--bucket-run", "r"]
    config = parse_config(argv, {})
    assert (config.replicas, config.bucket, config.bucket_runs) == ((), "s3://b", ("r",))
    text = report(config)
    assert "replicas = none" in text
    assert "allow_replicas = https://*.a.org" in text


def test_a_replica_and_a_pattern_can_have_a_token_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "own").write_text(f"{TOKEN}-file")
    path = tmp_path / "proxy.toml"
    path.write_text(
        'bucket = "s3://b"\nbucket_run = ["one", "two"]\n'
        'allow_replica = [{pattern = "https://*.jobs.example", token_env = "HF_TOKEN"}]\n'
        f'[[replica]]\nurl = "https://a/"\ntoken_file = "{tmp_path}/own"\n'
        '[[replica]]\nurl = "https://b"\n'
    )
    environ = {"HF_TOKEN": f"{TOKEN}-hub", "BUCKET_LORA_REPLICA_TOKEN": f"{TOKEN}-all"}
    config = parse_config(["--config", str(path)], environ)
    assert config.bucket_runs == ("one", "two")
    assert [config.token_of(origin) for origin in config.replicas] == [
        f"{TOKEN}-file",
        f"{TOKEN}-all",
    ]
    assert config.allow_replicas[0].token == f"{TOKEN}-hub"
    assert TOKEN not in repr(config)
    assert TOKEN not in report(config)
    assert "own ones for https://a" in report(config)
    with pytest.raises(ConfigError, match="HF_TOKEN is named for a token and is not set"):
        parse_config(["--config", str(path)], {})


def test_the_variable_of_the_replicas_token_can_be_named() -> None:
    config = parse_config([*REPLICA, "--replica-token-env", "HF_TOKEN"], {"HF_TOKEN": TOKEN})
    assert config.replica_token == TOKEN


def test_a_config_file_names_settings_like_the_flags_and_flags_win(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    path = tmp_path / "proxy.toml"
    path.write_text(
        'replica = ["http://a:1", "http://b:2"]\nport = 9000\nadapter_wait_s = 5\n'
        f'allow_broadcast = true\ntoken_file = "{tokens}"\n'
    )
    config = parse_config(["--config", str(path), "--port", "9001"], {})
    assert [origin.url for origin in config.replicas] == ["http://a:1", "http://b:2"]
    assert (config.port, config.adapter_wait_s, config.allow_broadcast) == (9001, 5.0, True)
    assert config.tokens == (TOKEN,)
    one = parse_config(["--config", str(path), *REPLICA], {})
    assert [origin.url for origin in one.replicas] == ["http://127.0.0.1:9000"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("port = ", "cannot be read"),
        ("prot = 1", "'prot' .* is no setting; known are: .*port"),
        ('token = "0123456789abcdef"', "'token' .* is no setting"),
        ("check = true", "'check' .* is no setting"),
        ('port = "8000"', "port .* must be a whole number"),
        ("port = 1.5", "port .* must be a whole number"),
        ("port = true", "port .* must be a whole number"),
        ("poll_s = true", "poll_s .* must be a number"),
        ('replica = "http://a"', "replica .* must be a list of texts or of tables"),
        ('allow_broadcast = "yes"', "allow_broadcast .* must be true or false"),
        ("bucket_run = [1]", "bucket_run .* must be a list of texts$"),
        ('replica = [{url = "http://a", token = "x"}]', "must be a list of texts or of tables"),
        ('replica = [{token_env = "A"}]', "must be a list of texts or of tables"),
        (
            'replica = [{url = "http://a", token_env = "A", token_file = "b"}]',
            "must be a list of texts or of tables",
        ),
        ("host = 5", "host .* must be text"),
        ("poll_s = -1", "--poll-s is -1.0; it must be above 0"),
    ],
)
def test_a_config_file_that_cannot_work_is_refused_by_name(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        parse_config([*REPLICA, "--config", str(path)], {})
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_config([*REPLICA, "--config", str(tmp_path / "none")], {})


def test_the_report_shows_every_setting_and_no_secret(tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(str(cert))
    certificate.private_key_pem.write_to_path(str(key))
    environ = {"BUCKET_LORA_PROXY_TOKEN": TOKEN, "BUCKET_LORA_REPLICA_TOKEN": TOKEN}
    argv = [*REPLICA, "--tls-cert", str(cert), "--tls-key", str(key)]
    text = report(parse_config(argv, environ))
    assert TOKEN not in text
    for field in fields(ProxyConfig):
        assert f"{field.name} = " in text
    assert "tokens = 1 tokens" in text
    assert "certificate valid until" in text
    with pytest.raises(ConfigError, match="expired on"):
        report(parse_config(argv, environ), now=datetime(9999, 1, 1, tzinfo=UTC))


def test_the_report_refuses_files_that_hold_something_else(tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("nothing")
    with pytest.raises(ConfigError, match="cannot be used together"):
        report(parse_config([*REPLICA, "--tls-cert", str(other), "--tls-key", str(other)], {}))
    with pytest.raises(ConfigError, match=r"--client-ca .* holds no certificate authority"):
        report(parse_config([*REPLICA, "--dev-cert", str(tmp_path), "--client-ca", str(other)], {}))
    with pytest.raises(ConfigError, match="holds no certificate authority"):
        report(parse_config([*REPLICA, "--replica-ca", str(other)], {}))


def test_check_prints_the_report_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLICA, "--check"]) == 0
    assert "replicas = http://127.0.0.1:9000" in capsys.readouterr().out
    assert main(["--check"]) == 2


def test_check_says_which_addresses_of_the_bucket_may_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(f"file://{tmp_path}")
    status = ReplicaStatus(
        replica_id="r", base_model="m", dtype="bfloat16", max_loras=4, max_lora_rank=8
    )
    for replica_id, url in (("good", "http://10.0.0.1:8000"), ("bad", "http://evil.example")):
        beat = Heartbeat(
            replica_id=replica_id, url=url, sequence=1, interval_s=15, written_at=0, status=status
        )
        write_heartbeat(store, beat)
    argv = ["--bucket", f"file://{tmp_path}", "--allow-replica", "http://10.0.0.0/8:8000"]
    assert main([*argv, "--check"]) == 0
    out = capsys.readouterr().out
    assert "1 addresses may be used" in out
    assert "http://10.0.0.1:8000 by http://10.0.0.0/8:8000" in out
    assert "not used: bad: 'http://evil.example': no --allow-replica pattern" in out
    argv[1] = f"file://{tmp_path}/not/there"
    assert main([*argv, "--check"]) == 1
    assert "cannot be read" in capsys.readouterr().out
