"""The general plugin: flags of ``vllm serve``, checked before a model loads.

vLLM calls ``register`` in the process that parses the command line, and again in every engine and
worker process. Without ``--plugin bucket-lora`` only the flags appear, and in engine processes two
hooks that pass on everything but this plugin's own adapters.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib
import importlib.metadata
import logging
import multiprocessing
import os
import sys
from typing import Any

from adapter_bucket.errors import BucketError, ConfigError, UnsupportedUpstream
from adapter_bucket.json_logs import wants_json
from adapter_bucket.stores import open_store
from adapter_bucket.traces import traces_wanted
from vllm_bucket_lora.config import (
    OPTIONS,
    PLUGIN_NAME,
    SESSION_ENV,
    URL_ENV,
    load_signing_keys,
    resolve_options,
)
from vllm_bucket_lora.goodbye import LastWord
from vllm_bucket_lora.session import create_session, remove_session

logger = logging.getLogger(__name__)

ENDPOINT_GROUP = "vllm.endpoint_plugins"
_OTHER_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Groups that VLLM_PLUGINS, once set, also restricts; while it is unset they load everything."""


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Idempotent.

    Does as little as the process needs: importing vLLM's argument parser into worker processes, or
    its LoRA modules into a command line process, would cost seconds.
    """
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        _add_flags_to(arguments.EngineArgs)
    if os.environ.get(SESSION_ENV):
        from vllm_bucket_lora.worker import install

        install()
    elif _is_engine_process() or _forks_engines():
        # Somebody who only has the plugin installed must not lose an engine to it.
        with contextlib.suppress(ImportError):
            from vllm_bucket_lora.worker import install

            install()


def _is_engine_process() -> bool:
    """Whether vLLM started this process to run a model, perhaps for an ``LLM`` that will follow.

    What is installed then is inert: it acts on adapters in this plugin's own directories only.
    """
    runs_model = {"vllm.v1.engine.core", "vllm.v1.worker.worker_base"} & set(sys.modules)
    return multiprocessing.parent_process() is not None and bool(runs_model)


def _forks_engines() -> bool:
    """Whether engines are forked from this process, as an offline ``LLM`` does by default.

    They load no plugin of their own then: vLLM's note that all are loaded is forked with them.
    ``vllm serve`` asks for fresh processes before plugins are loaded.
    """
    return os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") == "fork"


def _add_flags_to(engine_args: Any) -> None:
    """Wrap ``EngineArgs.add_cli_args``: vLLM has no hook for arguments of plugins.

    ``AsyncEngineArgs.add_cli_args`` loads the general plugins and calls it right afterwards. To be
    removed once an endpoint plugin can bring its own arguments; vLLM 0.31 has no such hook.
    """
    original = engine_args.add_cli_args
    if getattr(original, "_bucket_lora", False):
        return

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        if _is_server_parser(parser):
            _add_group(parser)
            _check_after_parsing(parser)
        return parser

    add_cli_args._bucket_lora = True  # type: ignore[attr-defined]
    engine_args.add_cli_args = staticmethod(add_cli_args)


def _is_server_parser(parser: argparse.ArgumentParser) -> bool:
    """``vllm bench`` and others take engine arguments too, but start no API server."""
    return any("--api-server-count" in action.option_strings for action in parser._actions)


def _add_group(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title=PLUGIN_NAME, description="Serve the LoRA adapters that trainers publish in a bucket."
    )
    group.add_argument(
        "--plugin",
        action="append",
        choices=[PLUGIN_NAME],
        default=argparse.SUPPRESS,
        help=f"Switch on an endpoint plugin. '{PLUGIN_NAME}' follows a bucket.",
    )
    for option in OPTIONS:
        group.add_argument(
            option.flag,
            dest=option.dest,
            metavar=option.metavar,
            default=argparse.SUPPRESS,  # so that an absent flag gives way to the environment
            help=f"{option.help}. Environment variable: {option.env}.",
        )


def _check_after_parsing(parser: Any) -> None:
    """Let ``parser`` end in our check, so that a mistake is reported like any other bad flag."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(args, namespace)
        try:
            activate(parsed)
        except BucketError as error:
            parser.error(f"{PLUGIN_NAME}: {error}")
        return parsed, rest

    parser.parse_known_args = parse_known_args


def activate(args: argparse.Namespace) -> None:
    """Check the settings, and switch the plugin on for this process and those it starts.

    Raises:
        BucketError: something would fail later; the message says what to change.
    """
    if PLUGIN_NAME not in getattr(args, "plugin", ()):
        _refuse_flags_without_plugin(args)
        return
    _check_server(args)
    wants_json()
    traces_wanted()
    # vLLM only logs an endpoint plugin that cannot be imported, and serves without it.
    importlib.import_module("vllm_bucket_lora.endpoints")
    resolve_options(args)
    load_signing_keys(args.bucket_lora_signing_key_file)
    open_store(args.bucket_lora_url)
    allow_endpoint_plugin()
    session = create_session(args.bucket_lora_cache_dir)
    atexit.register(remove_session, session)
    atexit.register(LastWord(session.path).say)  # runs first
    args.bucket_lora_session_dir = str(session.path)
    os.environ[SESSION_ENV] = str(session.path)
    os.environ[URL_ENV] = args.bucket_lora_url


def _refuse_flags_without_plugin(args: argparse.Namespace) -> None:
    for option in OPTIONS:
        if getattr(args, option.dest, None) is not None:
            raise ConfigError(f"{option.flag} has no effect without --plugin {PLUGIN_NAME}; add it")


def _check_server(args: argparse.Namespace) -> None:
    import vllm.plugins

    if not hasattr(vllm.plugins, "load_endpoint_plugins"):
        version = importlib.metadata.version("vllm")
        raise UnsupportedUpstream(
            f"vLLM {version} has no endpoint plugins; install vLLM 0.31.0 (0.26 is the oldest "
            "that has them)"
        )
    if not args.enable_lora:
        raise ConfigError("adapters cannot be served without --enable-lora; add it")
    if getattr(args, "grpc", False):
        raise ConfigError("--grpc starts no HTTP server to answer /bucket_lora/status; remove it")
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError("the Rust front-end loads no plugins; unset VLLM_USE_RUST_FRONTEND")
    if os.environ.get("VLLM_SKIP_MODEL_NAME_VALIDATION", "").strip().lower() in ("1", "true"):
        raise ConfigError(
            "the base model would answer for versions that are not loaded; unset "
            "VLLM_SKIP_MODEL_NAME_VALIDATION"
        )


def allow_endpoint_plugin() -> None:
    """Name the plugin in ``VLLM_PLUGINS``: vLLM loads endpoint plugins only if it does.

    The variable also restricts every other group of plugins, so those that load while it is unset
    are named too. Endpoint plugins of others stay off, as they were.
    """
    given = os.environ.get("VLLM_PLUGINS")
    if given is not None:
        names = given.split(",")
    else:
        found = importlib.metadata.entry_points()
        names = sorted({e.name for group in _OTHER_GROUPS for e in found.select(group=group)})
        others = {e.name for e in found.select(group=ENDPOINT_GROUP)} & set(names) - {PLUGIN_NAME}
        if others:
            logger.warning(
                "--plugin %s also allows the HTTP routes of %s, whose general plugins have the "
                "same names; set VLLM_PLUGINS yourself to leave them out",
                PLUGIN_NAME,
                ", ".join(sorted(others)),
            )
    if PLUGIN_NAME not in names:
        names.append(PLUGIN_NAME)
    os.environ["VLLM_PLUGINS"] = ",".join(names)
