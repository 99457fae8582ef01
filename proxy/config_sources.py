"""Reads the settings from flags, environment and files, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from adapter_bucket.errors import ConfigError
from bucket_lora_proxy.auth import check_token, read_tokens
from bucket_lora_proxy.config import ProxyConfig
from bucket_lora_proxy.config_checks import check_config
from bucket_lora_proxy.config_file import Entry, read_config_file
from bucket_lora_proxy.config_flags import REPLICA_TOKEN_ENV, TOKEN_ENV, build_parser
from bucket_lora_proxy.membership.rule import AllowRule
from bucket_lora_proxy.upstream import Origin

NOT_SETTINGS = frozenset(
    {
        "config",
        "check",
        "replica",
        "allow_replica",
        "bucket_run",
        "token_file",
        "replica_token_file",
        "replica_token_env",
    }
)
"""Flags that are read here and stand in the settings under another name."""


def parse_config(argv: Sequence[str], environ: Mapping[str, str]) -> ProxyConfig:
    """Read flags, the config file and the environment; flags win over the file.

    Raises:
        ConfigError: a value is wrong, a file can't be read, or the bind would be public without
            protection. ``SystemExit`` for an unknown flag, as usual for argparse.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    lists: dict[str, list[Entry]] = {}
    if args.config is not None:
        settings, lists = read_config_file(args.config, parser)
        parser.set_defaults(**settings)
        args = parser.parse_args(argv)

    def items(name: str) -> list[Entry]:  # flags replace a list of the file, they don't extend it
        texts = getattr(args, name)
        return [Entry(text) for text in texts] if texts else lists.get(name, [])

    replicas = [(Origin.parse(entry.text), entry) for entry in items("replica")]
    own = {origin.url: _own_token(entry, environ) for origin, entry in replicas}
    config = ProxyConfig(
        replicas=tuple(origin for origin, _ in replicas),
        replica_tokens={url: token for url, token in own.items() if token is not None},
        allow_replicas=tuple(
            AllowRule.parse(entry.text, token=_own_token(entry, environ))
            for entry in items("allow_replica")
        ),
        bucket_runs=tuple(entry.text for entry in items("bucket_run")),
        tokens=_tokens(args.token_file, environ, TOKEN_ENV),
        replica_token=_replica_token(args.replica_token_file, environ, args.replica_token_env),
        **{name: value for name, value in vars(args).items() if name not in NOT_SETTINGS},
    )
    check_config(config)
    return config


def _replica_token(path: Path | None, environ: Mapping[str, str], variable: str) -> str | None:
    if path is None and variable != REPLICA_TOKEN_ENV and not environ.get(variable):
        raise ConfigError(f"environment variable {variable} is named for a token and is not set")
    return _single(_tokens(path, environ, variable))


def _own_token(entry: Entry, environ: Mapping[str, str]) -> str | None:
    """The token of one replica or pattern, if the config file names one for it."""
    if entry.token_env is not None:
        return _replica_token(None, environ, entry.token_env)
    return _single(read_tokens(entry.token_file)) if entry.token_file is not None else None


def _single(tokens: Sequence[str]) -> str | None:
    if len(tokens) > 1:
        raise ConfigError(f"{len(tokens)} replica tokens are given; exactly one is used")
    return tokens[0] if tokens else None


def _tokens(path: Path | None, environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    if path is not None:
        return read_tokens(path)
    tokens = tuple(environ.get(variable, "").split())
    for token in tokens:
        check_token(token, f"environment variable {variable}")
    return tokens
