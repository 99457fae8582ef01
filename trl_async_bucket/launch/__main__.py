"""``python -m trl_async_bucket.launch hf-jobs | with-proxy``: see the modules of these names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from adapter_bucket.errors import BucketError
from trl_async_bucket.launch.with_proxy import START_WAIT_S, ProxiedCommand


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m trl_async_bucket.launch", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)
    jobs = commands.add_parser(
        "hf-jobs", help="start replicas and trainer on Hugging Face Jobs", allow_abbrev=False
    )
    jobs.add_argument("--config", type=Path, required=True, metavar="FILE", help="the run, in YAML")
    jobs.add_argument(
        "--dry-run", action="store_true", help="print what would be started and what it costs"
    )
    beside = commands.add_parser(
        "with-proxy",
        help="run a command with bucket-lora-proxy beside it",
        usage="%(prog)s [--dry-run] [--port N] [--wait-s N] [flags of bucket-lora-proxy …] "
        "-- COMMAND …",
        allow_abbrev=False,
    )
    beside.add_argument(
        "--dry-run", action="store_true", help="check the proxy's settings, print what would run"
    )
    beside.add_argument("--port", type=int, default=8000, help="of the proxy (%(default)s)")
    beside.add_argument(
        "--wait-s", type=float, default=START_WAIT_S, metavar="SECONDS",
        help="longest wait for a healthy replica before the command is started (%(default)s)",
    )  # fmt: skip
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if "--" in given else len(given)
    own, command = given[:place], given[place + 1 :]
    options, rest = parser().parse_known_args(own)
    try:
        if options.command == "with-proxy":
            proxied = ProxiedCommand(
                command, proxy_flags=rest, port=options.port, wait_s=options.wait_s
            )
            return proxied.dry_run() if options.dry_run else proxied.run()
        if rest or command:
            parser().error(f"unrecognized arguments: {' '.join(rest + command)}")
        from trl_async_bucket.launch.hf_jobs import launch

        return launch(options.config, dry_run=options.dry_run)
    except BucketError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
